import dataclasses

import pytest

from gemsmith.errors import RecipeError
from gemsmith.zoo import LORA_KINDS, VARIANTS, find_variant, lora_targets, parameter_count, text_tensors

PUBLISHED_BILLIONS = {
    "gemma4-e2b": 4.65,
    "gemma4-e4b": 7.52,
    "gemma4-12b": 11.91,
    "gemma4-26b-a4b": 25.23,
    "gemma4-31b": 30.70,
}


def adapter_count(targets, rank):
    return sum(rank * sum(target.shape) for target in targets)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_BILLIONS.items())
def test_the_tensors_add_up_to_the_published_count(name, billions):
    """The files of E2B and E4B carry k, v and k_norm in layers that share another's, and the published counts include
    them."""
    count = parameter_count(text_tensors(find_variant(name), optional=True))
    assert round(count / 1e9, 2) == billions


def test_the_31b_counted_exactly():
    assert round(parameter_count(text_tensors(find_variant("gemma4-31b"))) / 1e9, 3) == 30.697


def test_lora_on_every_projection_of_the_31b_and_the_published_recipes_count():
    """489.7 M; the published recipe had none on K of the global layers, and one A for K and V of the local ones: 467.8
    M."""
    variant = find_variant("gemma4-31b")
    targets = lora_targets(variant)
    assert adapter_count(targets, 64) == 489_717_760
    without_global_k = [target for target in targets if not (target.role == "k" and variant.is_global(target.layer))]
    shared_a = 64 * variant.embed_dim * sum(1 for layer in range(variant.layers) if not variant.is_global(layer))
    assert round((adapter_count(without_global_k, 64) - shared_a) / 1e6, 1) == 467.8


def test_layers_that_are_k_is_v_have_k_adapters_and_no_v():
    variant = find_variant("gemma4-31b")
    kinds = {kind: sum(target.role == kind for target in lora_targets(variant)) for kind in LORA_KINDS}
    assert kinds == {"q": 60, "k": 60, "v": 50, "o": 60, "gate": 60, "up": 60, "down": 60}


def test_layers_that_share_kv_have_no_kv_tensors_unless_asked_for():
    variant = find_variant("gemma4-e2b")
    used, all_of_them = text_tensors(variant), text_tensors(variant, optional=True)
    assert sum(tensor.role == "k" for tensor in used) == 15 and sum(tensor.role == "k" for tensor in all_of_them) == 35
    assert {tensor.role for tensor in all_of_them if tensor.optional} == {"k", "v", "norm"}
    last = [tensor for tensor in used if tensor.layer == 34 and tensor.role == "up"]
    assert last[0].shape == (12_288, 1536), "layers that share kv have an MLP twice as wide"


def test_experts_and_router_get_no_adapter():
    targets = lora_targets(find_variant("gemma4-26b-a4b"))
    assert targets and not any("experts" in target.name or "router" in target.name for target in targets)


@pytest.mark.parametrize("name", VARIANTS)
def test_names_are_unique_and_text_only(name):
    names = [tensor.name for tensor in text_tensors(VARIANTS[name], optional=True)]
    assert len(names) == len(set(names)) > 0
    assert all(tensor.startswith("model.language_model.") for tensor in names)


@pytest.mark.parametrize("kinds", [("q", "w"), ("qkv",), ()])
def test_targets_that_match_nothing_are_an_error(kinds):
    with pytest.raises(RecipeError, match=r"^lora\.targets"):
        lora_targets(find_variant("gemma4-31b"), kinds)


def test_kinds_of_which_a_variant_has_no_matrix_are_refused():
    """Where every layer is global and K = V, there is no V to adapt."""
    variant = dataclasses.replace(find_variant("tiny-31b"), name="custom", global_every=1)
    with pytest.raises(RecipeError, match=r"lora\.targets: custom has no matrix of v, so nothing would be trained"):
        lora_targets(variant, ["v"])
    assert {target.role for target in lora_targets(variant, ["k", "v"])} == {"k"}
