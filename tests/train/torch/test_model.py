"""The PyTorch model: where it is read to, and that what replaces upstream's modules gives what they give, in fewer
passes over memory."""

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from gemsmith.arch import lora_targets
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.recipe.backends import BACKENDS
from gemsmith.recipe.load import build_recipe
from gemsmith.train.torch import upstream as trl_upstream
from gemsmith.train.torch.attention import attention_inputs
from gemsmith.train.torch.images import number_images, pad_images
from gemsmith.train.torch.model import _embed_images, adapted_model, adapters_of, load_base
from tiny_checkpoints import IMAGE_TOKENS

CPU, META = torch.device("cpu"), torch.device("meta")


def recipe_of(checkpoint, dtype="bfloat16"):
    values = {
        "checkpoint": str(checkpoint),
        "data": {"train": "not read"},
        "train": {"backend": "trl", "dtype": dtype},
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


IMAGE = IMAGE_TOKENS["image_token"][0]
LENGTHS = (100, 130)


class Packed:
    """A row of two documents: in the first an image beyond the window of 64, in the second two side by side."""

    def __init__(self, vision, make_patches):
        random = np.random.default_rng(5)
        self.images = [make_patches(vision, 9, 9), make_patches(vision, 3, 4), make_patches(vision, 5, 2)]
        self.tokens = random.integers(108, 1024, (1, sum(LENGTHS)))
        for begin, image in zip((10, 110, 124), self.images, strict=True):
            self.tokens[0, begin : begin + image.soft_tokens] = IMAGE
        self.segments = np.repeat([1, 2], LENGTHS)[None].astype(np.int32)
        self.positions = np.concatenate([np.arange(length) for length in LENGTHS])[None]

    def hidden(self, model, implementation, variant):
        """What our forward pass makes of the row, before the loss."""
        numbers = number_images(self.tokens, [self.images], IMAGE) if variant.bidirectional_images else None
        mask = attention_inputs(implementation, self.segments, numbers, variant.sliding_window, CPU, torch.float32)
        found = []
        text = model.model.language_model
        hook = text.register_forward_hook(lambda _module, _inputs, out: found.append(out.last_hidden_state))
        with hook, torch.no_grad():
            model(
                tokens=torch.tensor(self.tokens),
                positions=torch.tensor(self.positions),
                loss_mask=torch.tensor(self.tokens != IMAGE),
                attention_mask=mask,
                **pad_images([self.images]),
            )
        return found[0][0]

    def upstream(self, model):
        """What upstream makes of each document alone, with the masks that it generates with."""
        parts, end = [], 0
        for length, images in zip(LENGTHS, (self.images[:1], self.images[1:]), strict=True):
            begin, end = end, end + length
            tokens = torch.tensor(self.tokens[:, begin:end])
            types = (tokens == IMAGE).long()
            embeds = torch.zeros(*tokens.shape, model.config.text_config.hidden_size)
            rest = {"attention_mask": None, "past_key_values": None, "position_ids": None, "mm_token_type_ids": types}
            mask = model.create_masks_for_generate(model.config, embeds, **rest)
            with torch.no_grad():
                out = model.model(input_ids=tokens, attention_mask=mask, use_cache=False, **pad_images([images]))
            parts.append(out.last_hidden_state[0])
        return torch.cat(parts)


@pytest.mark.parametrize(
    "name", ["tiny-31b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-e2b", "tiny-12b"))]
)
def test_packed_images_are_seen_as_upstream_sees_them_where_it_generates(even_checkpoint, make_patches, name):
    checkpoint = open_checkpoint(str(even_checkpoint(name, vision=True)))
    packed = Packed(checkpoint.variant.vision, make_patches)
    reference = AutoModelForImageTextToText.from_pretrained(
        checkpoint.folder, attn_implementation="eager", dtype=torch.float32
    )
    expected = packed.upstream(reference)
    for implementation in BACKENDS["trl"].attentions:
        model = load_base(recipe_of(checkpoint.folder, "float32"), checkpoint, implementation, CPU, vision=True)
        found = packed.hidden(model, implementation, checkpoint.variant)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_what_embeds_images_is_there_for_rows_that_have_some_and_frozen(even_checkpoint):
    checkpoint = open_checkpoint(str(even_checkpoint("tiny-31b", vision=True)))
    recipe = recipe_of(checkpoint.folder)
    plain, seeing = (load_base(recipe, checkpoint, "documents", CPU, vision=vision) for vision in (False, True))
    assert plain.model.vision_tower is None and plain.model.embed_vision is None
    weights = [*seeing.model.vision_tower.parameters(), *seeing.model.embed_vision.parameters()]
    assert weights and not any(weight.requires_grad for weight in weights)
    assert {weight.dtype for weight in weights} == {torch.bfloat16}


def test_rows_with_images_are_never_left_to_masks_of_upstream(even_checkpoint):
    checkpoint = open_checkpoint(str(even_checkpoint("tiny-31b", vision=True)))
    model = load_base(recipe_of(checkpoint.folder), checkpoint, "documents", CPU, vision=True)
    row = torch.full((1, 4), 200)
    for mask in (None, torch.ones(1, 4), {"full_attention": []}):
        with pytest.raises(AssertionError, match="upstream would make masks of its own"):
            model(tokens=row, positions=row, loss_mask=row > 0, attention_mask=mask)


def test_an_image_is_embedded_under_autocast_as_without(even_checkpoint, make_patches):
    checkpoint = open_checkpoint(str(even_checkpoint("tiny-31b", vision=True)))
    model = load_base(recipe_of(checkpoint.folder), checkpoint, "documents", CPU, vision=True)
    images = pad_images([[make_patches(checkpoint.variant.vision, 4, 3)]])
    plain = model.model.get_image_features(**images, return_dict=True).pooler_output[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = _embed_images(model, **images).pooler_output[0]
        theirs = model.model.get_image_features(**images, return_dict=True).pooler_output[0]
    assert torch.equal(ours, plain) and not torch.equal(theirs, plain)


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-12b", "tiny-26b-a4b"])
def test_all_linear_is_what_peft_takes_it_for(even_checkpoint, name):
    checkpoint = open_checkpoint(str(even_checkpoint(name, vision=True)))
    recipe = recipe_of(checkpoint.folder)
    wide = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"targets": ("all-linear",)})})
    model = adapted_model(wide, checkpoint, "documents", META, vision=True)
    base = load_base(recipe, checkpoint, "documents", META, vision=True)
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
    assert adapters_of(model).keys() == adapters_of(theirs).keys()
    assert adapters_of(model).keys() == {target.module for target in lora_targets(checkpoint.variant, ["all-linear"])}


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-12b"])
def test_rows_without_an_image_give_adapters_of_the_tower_a_gradient_of_zero(even_checkpoint, name):
    """AdamW takes none for no step at all, and of several processes one would wait for it."""
    checkpoint = open_checkpoint(str(even_checkpoint(name, vision=True)))
    recipe = recipe_of(checkpoint.folder)
    wide = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"targets": ("all-linear",)})})
    model = adapted_model(wide, checkpoint, "documents", CPU, vision=True)
    for layer in adapters_of(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight)
    segments = np.ones((1, 8), np.int32)
    mask = attention_inputs("documents", segments, None, 64, CPU, torch.bfloat16)
    row = torch.arange(8)[None] + 200
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens=row, positions=row - 200, loss_mask=row > 203, attention_mask=mask)[0].backward()
    for module, layer in adapters_of(model).items():
        gradient = layer.lora_A["default"].weight.grad
        assert gradient.any() != ("vision" in module), module
