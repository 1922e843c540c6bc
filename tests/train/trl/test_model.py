"""The PyTorch model: where it is read to, and that what replaces upstream's modules gives what they give, in fewer
passes over memory."""

import pytest
import torch
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from gemsmith.checkpoint import open_checkpoint
from gemsmith.recipe_file import build_recipe
from gemsmith.train.trl import upstream as trl_upstream
from gemsmith.train.trl.model import adapted_model, adapters_of

META = torch.device("meta")


def recipe_of(checkpoint):
    values = {
        "checkpoint": str(checkpoint),
        "data": {"train": "not read"},
        "train": {"backend": "trl", "dtype": "bfloat16"},
    }
    return build_recipe(values | {"lora": {"rank": 4, "dropout": 0.0}})


@pytest.fixture(params=["tiny-31b", "tiny-12b", "tiny-26b-a4b"])
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint(request.param)


def test_weights_are_read_straight_onto_the_device(checkpoint):
    model = adapted_model(recipe_of(checkpoint), open_checkpoint(str(checkpoint)), "documents", META)
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {META}
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    assert {weight.dtype for weight in frozen} == {torch.bfloat16}


def test_every_norm_is_one_operation_and_keeps_its_dtype(checkpoint):
    model = adapted_model(recipe_of(checkpoint), open_checkpoint(str(checkpoint)), "documents", torch.device("cpu"))
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(norms) > 6 * len(model.get_base_model().model.language_model.layers)
    for norm in norms:
        x = torch.randn(3, 5, norm.weight.numel() if norm.with_scale else 8).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.profiler.profile() as profile:
            ours = norm(x)
        assert (
            ours.dtype == torch.bfloat16
            and sum(event.name == "aten::_fused_rms_norm" for event in profile.events()) == 1
        )
        # Where float32 lies between two, it may be rounded to the other.
        torch.testing.assert_close(ours, type(norm).forward(norm, x), rtol=2**-7, atol=0)
        assert (ours == type(norm).forward(norm, x)).float().mean() > 0.99


def test_a_norm_is_outside_autocast(monkeypatch):
    """CUDA's list of what autocast runs in float32 has rms_norm; that of CPU has not."""
    found = []
    monkeypatch.setattr(trl_upstream, "rms_norm", lambda x, *_: found.append(torch.is_autocast_enabled("cpu")) or x)
    norm = Gemma4RMSNorm(8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trl_upstream.normed(norm, torch.randn(2, 8).bfloat16())
        assert torch.is_autocast_enabled("cpu")
    assert found == [False]


def test_an_adapter_adds_to_what_the_base_gave_in_place(checkpoint):
    model = adapted_model(recipe_of(checkpoint), open_checkpoint(str(checkpoint)), "documents", torch.device("cpu"))
    layer = next(iter(adapters_of(model).values()))
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    places = []
    layer.base_layer.register_forward_hook(lambda _module, _inputs, out: places.append(out.data_ptr()))
    x = torch.randn(2, 3, layer.in_features).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        theirs = type(layer).forward(layer, x)
    assert out.data_ptr() == places[0]
    torch.testing.assert_close(out, theirs, rtol=2**-6, atol=2**-6)
    assert not any("CopySlices" in str(node) for node, _ in out.grad_fn.next_functions)
