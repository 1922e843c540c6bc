import dataclasses
from collections import Counter

import pytest

from gemsmith.arch import ALL_LINEAR, LORA_KINDS, VISION, find_variant, kinds_of, lora_targets, vision_targets
from gemsmith.errors import RecipeError
from tiny_checkpoints import with_vision


def adapter_count(targets, rank):
    return sum(rank * sum(target.shape) for target in targets)


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


def test_experts_and_router_get_no_adapter():
    targets = lora_targets(find_variant("gemma4-26b-a4b"))
    assert targets and not any("experts" in target.name or "router" in target.name for target in targets)


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


def test_vision_is_every_projection_of_the_towers_layers_and_the_one_into_the_text_model():
    """27 layers of seven, and one; the projection of patches stays as it is."""
    variant = find_variant("gemma4-31b")
    targets = lora_targets(variant, [VISION])
    assert len(targets) == 27 * 7 + 1
    names = {target.module.removeprefix("model.") for target in targets}
    assert {"vision_tower.encoder.layers.26.mlp.down_proj.linear", "embed_vision.embedding_projection"} < names
    assert not any("patch_embedder" in name for name in names)
    assert lora_targets(variant, [*LORA_KINDS, VISION]) == lora_targets(variant) + targets


@pytest.mark.parametrize("name", ["gemma4-12b", "tiny-31b"])
def test_vision_needs_a_tower(name):
    variant = find_variant(name)
    with pytest.raises(RecipeError, match=rf"^lora.targets: {name} has no vision tower; take vision out"):
        lora_targets(variant, ["q", VISION])
    assert VISION not in kinds_of(variant) and VISION in kinds_of(find_variant("gemma4-e2b"))


def test_all_linear_has_all_that_multiplies_but_experts_embeddings_and_the_output():
    kinds = {
        name: Counter(target.role for target in lora_targets(find_variant(name), [ALL_LINEAR]))
        for name in ("gemma4-31b", "gemma4-e2b", "gemma4-26b-a4b", "gemma4-12b")
    }
    assert kinds["gemma4-31b"] - Counter(dict.fromkeys(LORA_KINDS, 60)) == {"vision": 27 * 7 + 1, "vision_patch": 1}
    assert kinds["gemma4-e2b"]["per_layer_gate"] == kinds["gemma4-e2b"]["per_layer_out"] == 35
    assert kinds["gemma4-e2b"]["per_layer_projection"] == 1 and kinds["gemma4-26b-a4b"]["router"] == 30
    assert kinds["gemma4-12b"]["vision"] == kinds["gemma4-12b"]["vision_patch"] == 1
    assert not any(role.startswith(("expert", "embed", "norm")) for counts in kinds.values() for role in counts)


def test_the_tower_and_what_is_behind_it_are_adapted_for_images():
    seeing = with_vision(find_variant("tiny-31b"))
    assert vision_targets(seeing, ("q", "down")) == set()
    found = vision_targets(seeing, ("q", VISION))
    assert len(found) == 3 * 7 + 1 and "model.embed_vision.embedding_projection" in found
    assert vision_targets(seeing, (ALL_LINEAR,)) - found == {"model.vision_tower.patch_embedder.input_proj"}
