import pytest

from gemsmith.arch import VARIANTS, find_variant, parameter_count, text_tensors

PUBLISHED_BILLIONS = {
    "gemma4-e2b": 4.65,
    "gemma4-e4b": 7.52,
    "gemma4-12b": 11.91,
    "gemma4-26b-a4b": 25.23,
    "gemma4-31b": 30.70,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_BILLIONS.items())
def test_the_tensors_add_up_to_the_published_count(name, billions):
    """The files of E2B and E4B carry k, v and k_norm in layers that share another's, and the published counts include
    them."""
    count = parameter_count(text_tensors(find_variant(name), optional=True))
    assert round(count / 1e9, 2) == billions


def test_the_31b_counted_exactly():
    assert round(parameter_count(text_tensors(find_variant("gemma4-31b"))) / 1e9, 3) == 30.697


def test_layers_that_share_kv_have_no_kv_tensors_unless_asked_for():
    variant = find_variant("gemma4-e2b")
    used, all_of_them = text_tensors(variant), text_tensors(variant, optional=True)
    assert sum(tensor.role == "k" for tensor in used) == 15 and sum(tensor.role == "k" for tensor in all_of_them) == 35
    assert {tensor.role for tensor in all_of_them if tensor.optional} == {"k", "v", "norm"}
    last = [tensor for tensor in used if tensor.layer == 34 and tensor.role == "up"]
    assert last[0].shape == (12_288, 1536), "layers that share kv have an MLP twice as wide"


@pytest.mark.parametrize("name", VARIANTS)
def test_names_are_unique_and_text_only(name):
    names = [tensor.name for tensor in text_tensors(VARIANTS[name], optional=True)]
    assert len(names) == len(set(names)) > 0
    assert all(tensor.startswith("model.language_model.") for tensor in names)
