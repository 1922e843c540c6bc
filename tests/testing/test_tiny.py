import pytest

from gemsmith.checkpoint import open_checkpoint
from gemsmith.testing.tiny import make_checkpoint
from gemsmith.zoo import VARIANTS, find_variant, text_tensors

TINY = [name for name in VARIANTS if name.startswith("tiny")]


@pytest.mark.parametrize("name", TINY)
def test_a_made_checkpoint_opens_as_its_variant_with_every_tensor(name, tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint(name)), variant=find_variant(name))
    assert checkpoint.variant.name == name
    assert set(checkpoint.places) == {tensor.name for tensor in text_tensors(checkpoint.variant)}
    assert checkpoint.read("model.language_model.norm.weight").shape == (checkpoint.variant.embed_dim,)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    one, two = (make_checkpoint(find_variant("tiny-12b"), tmp_path / name) for name in ("one", "two"))
    for file in sorted(one.iterdir()):
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name
