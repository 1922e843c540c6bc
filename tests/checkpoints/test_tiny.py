import json

import pytest
from tokenizers import Tokenizer

from gemsmith.arch import VARIANTS, find_variant, text_tensors, vision_tensors
from gemsmith.checkpoints.folder import open_checkpoint
from tiny_checkpoints import IMAGE_TOKENS, make_checkpoint, with_vision

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


@pytest.mark.parametrize("name", TINY)
def test_with_vision_a_checkpoint_has_the_same_text_model_and_tokens_of_images(name, tiny_checkpoint, tmp_path):
    plain = open_checkpoint(str(tiny_checkpoint(name, "bfloat16")))
    seeing = open_checkpoint(str(make_checkpoint(with_vision(find_variant(name)), tmp_path / "base")))
    assert seeing.variant == with_vision(plain.variant)
    assert {tensor.name for tensor in vision_tensors(seeing.variant)} == seeing.places.keys() - plain.places.keys()
    for tensor in text_tensors(plain.variant):
        assert plain.read(tensor.name).tobytes() == seeing.read(tensor.name).tobytes()
    tokenizer = Tokenizer.from_file(str(seeing.folder / "tokenizer.json"))
    for key, (number, token) in IMAGE_TOKENS.items():
        assert tokenizer.encode(token, add_special_tokens=False).ids == [number]
        assert json.loads((seeing.folder / "tokenizer_config.json").read_text())[key] == token
    assert seeing.config["image_token_id"] == tokenizer.token_to_id("<|image|>")
