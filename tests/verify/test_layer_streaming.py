"""A model with one layer's weights in memory at a time computes what the whole one does."""

from dataclasses import replace

import numpy as np
import pytest

from gemsmith.arch import find_variant, lora_targets
from gemsmith.arch.tensors import class_names
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import LoraPair, read_peft_adapter, write_peft_adapter
from gemsmith.checkpoints.quantized import as_trained
from gemsmith.recipe.schema import Train
from gemsmith.train.torch.upstream import quiet
from gemsmith.verify import logits
from gemsmith.verify.prompts import image_prompt, text_prompts
from gemsmith.verify.stage import verify
from tiny_checkpoints import make_checkpoint, with_vision

TINY = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b")


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("tiny-e2b", "bfloat16"),
        ("tiny-12b", "nf4"),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in TINY if name != "tiny-e2b"),
        pytest.param("tiny-26b-a4b", "int8", marks=pytest.mark.slow),
    ],
)
def test_layer_by_layer_logits_are_those_of_the_whole_model(tiny_checkpoint, adapter_of, tmp_path, variant, dtype):
    adapter, base = adapter_of(variant), open_checkpoint(str(tiny_checkpoint(variant, "bfloat16")))
    base = as_trained(base, Train(dtype=dtype))
    write_peft_adapter(adapter, tmp_path, "base")
    prompts = text_prompts(None, base.variant.vocabulary, 0)
    with quiet():
        whole, streamed = (
            logits._adapted_logits(base, tmp_path, adapter, prompts, streamed=streamed) for streamed in (False, True)
        )
    for name, one, other in zip(("base", "base + adapter", "rounded"), whole, streamed, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5, err_msg=name)  # measured: 0
    assert logits._distance(streamed[0], streamed[1]) > 0.1 and logits._distance(streamed[1], streamed[2]) > 1e-3
    if dtype != "bfloat16":
        with quiet():
            assert logits._distance(whole[0], logits._run(logits.load_model(base.folder), prompts)) > 0.05


@pytest.mark.parametrize(
    "variant", ["tiny-e2b", *(pytest.param(name, marks=pytest.mark.slow) for name in TINY if name != "tiny-e2b")]
)
def test_images_are_seen_layer_by_layer_as_by_the_whole_model(adapter_of, tmp_path, variant):
    """With adapters on every linear layer, those that embed images, per-layer inputs and routers among them."""
    sees = with_vision(find_variant(variant))
    base = open_checkpoint(str(make_checkpoint(sees, tmp_path / "base")))
    adapter = adapter_of(variant)
    random = np.random.default_rng(0)
    modules = dict(adapter.modules)
    for target in lora_targets(sees, ["all-linear"]):
        out, inner = target.shape
        a, b = (random.standard_normal(shape).astype(np.float32) / 4 for shape in ((4, inner), (out, 4)))
        modules[target.module] = LoraPair(a=a, b=b)
    adapter = replace(adapter, modules=modules)
    write_peft_adapter(adapter, tmp_path / "adapter", "base", class_names=class_names(sees))
    prompts = [image_prompt(base, None, 0, 0)]
    with quiet():
        whole, streamed = (
            logits._adapted_logits(base, tmp_path / "adapter", adapter, prompts, streamed=streamed)
            for streamed in (False, True)
        )
        blind = replace(prompts[0], image=None)
        unseen, *_ = logits._adapted_logits(base, tmp_path / "adapter", adapter, [blind], streamed=True)
    for name, one, other in zip(("base", "base + adapter", "rounded"), whole, streamed, strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=1e-5, err_msg=name)
    assert logits._distance(streamed[0], streamed[1]) > 0.1 and logits._distance(streamed[0], unseen) > 0.1


def test_a_model_that_fits_only_layer_by_layer_is_compared_so(exported, monkeypatch):
    need = logits.streaming_needed_bytes(
        open_checkpoint(exported.recipe.checkpoint), read_peft_adapter(exported.adapter)
    )
    monkeypatch.setattr(logits, "memory_needed_bytes", lambda base: need + 2)
    monkeypatch.setattr(logits, "free_memory_bytes", lambda: need + 1)
    record = verify(exported)
    assert record.checks[-1].passed and "layer by layer" in record.checks[-1].detail
    assert record.logits_max_abs_difference < 1e-4
