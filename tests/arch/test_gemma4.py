import pytest

from gemsmith.arch import find_variant, variant_of_hub_id
from gemsmith.errors import RecipeError


@pytest.mark.parametrize(
    ("name", "layers", "global_layers"),
    [
        ("gemma4-e2b", 35, 7),
        ("gemma4-e4b", 42, 7),
        ("gemma4-12b", 48, 8),
        ("gemma4-26b-a4b", 30, 5),
        ("gemma4-31b", 60, 10),
    ],
)
def test_global_layers_are_as_many_as_published(name, layers, global_layers):
    kinds = find_variant(name).layer_types
    assert (len(kinds), kinds.count("full_attention"), kinds[-1]) == (layers, global_layers, "full_attention")


def test_hub_ids_are_known_whatever_their_case():
    assert variant_of_hub_id("google/gemma-4-31b-IT").name == "gemma4-31b"
    assert variant_of_hub_id("google/gemma-3-27b") is None


def test_an_unknown_model_names_a_near_one():
    with pytest.raises(RecipeError, match=r"model: 'gemma4-31' is not known \(did you mean gemma4-31b\?\)"):
        find_variant("gemma4-31")
