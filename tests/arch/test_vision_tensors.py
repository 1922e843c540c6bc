from dataclasses import replace

import pytest

from gemsmith.arch import VARIANTS, find_variant, parameter_count, text_tensors, vision_tensors
from gemsmith.arch.tensors import CLIP_BOUNDS

PUBLISHED = [name for name in VARIANTS if name.startswith("gemma4")]


# The tower, or what the 12B has for one; the projector into the text model's width.
@pytest.mark.parametrize(
    ("name", "encoder_millions", "projector"),
    [
        ("gemma4-e2b", 167.4, 768 * 1536),
        ("gemma4-e4b", 167.4, 768 * 2560),
        ("gemma4-12b", 35.2, 3840 * 3840),
        ("gemma4-26b-a4b", 569.6, 1152 * 2816),
        ("gemma4-31b", 569.6, 1152 * 5376),
    ],
)
def test_vision_has_as_many_parameters_as_published(name, encoder_millions, projector):
    *encoder, last = vision_tensors(find_variant(name))
    assert round(parameter_count(encoder) / 1e6, 1) == encoder_millions
    assert (last.name, last.size) == ("model.embed_vision.embedding_projection.weight", projector)


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_are_unique_and_none_is_the_text_models(name):
    variant = VARIANTS[name]
    names = [tensor.name for tensor in (*text_tensors(variant, optional=True), *vision_tensors(variant))]
    assert len(names) == len(set(names))
    assert vision_tensors(replace(variant, vision=None)) == []


def test_each_of_a_clipped_towers_linear_layers_has_four_bounds_of_its_own():
    bounds = [tensor for tensor in vision_tensors(find_variant("gemma4-e2b")) if tensor.role == "vision_bound"]
    assert len(bounds) == 16 * 7 * len(CLIP_BOUNDS) and {tensor.shape for tensor in bounds} == {()}
    large = vision_tensors(find_variant("gemma4-31b"))
    assert not any(tensor.role == "vision_bound" for tensor in large)
    assert [tensor.name for tensor in large if tensor.role == "vision_std"] == [
        "model.vision_tower.std_bias",
        "model.vision_tower.std_scale",
    ]


def test_the_12b_has_the_names_of_its_files_not_of_transformers_modules():
    names = {tensor.name for tensor in vision_tensors(find_variant("gemma4-12b"))}
    assert {"model.vision_embedder.patch_dense.bias", "model.vision_embedder.pos_embedding"} <= names
