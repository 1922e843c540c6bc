"""What the compared models are asked."""

from dataclasses import replace

import numpy as np
import pytest

from gemsmith.arch import find_variant
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.data.packing import Rows
from gemsmith.images.check import ImageInfo, patchify, validate_image
from gemsmith.images.patches import read_patching, scale
from gemsmith.verify.prompts import image_prompt, text_prompts
from support.images import image_bytes
from tiny_checkpoints import IMAGE_TOKENS, make_checkpoint, with_vision

IMAGE, BEGIN, END = (IMAGE_TOKENS[name][0] for name in ("image_token", "boi_token", "eoi_token"))


def generate_rows(tokens, segments, images=()):
    tokens, segments = np.array(tokens), np.array(segments)
    return Rows(tokens=tokens, segments=segments, positions=tokens, loss_mask=segments > 0, images=images)


@pytest.fixture(scope="module", params=["tiny-31b", "tiny-12b"])
def base(request, tmp_path_factory):
    variant = replace(with_vision(find_variant(request.param)), layers=2, name="custom")
    return open_checkpoint(str(make_checkpoint(variant, tmp_path_factory.mktemp("base") / "base", shards=1)))


def test_prompts_are_documents_that_were_trained_on():
    tokens = np.arange(1, 25).reshape(2, 12)
    prompts = text_prompts(generate_rows(tokens, [[1] * 5 + [2] * 4 + [0] * 3, [1] * 12]), 1024, 0)
    assert [prompt.tokens.tolist() for prompt in prompts] == [[1, 2, 3, 4, 5], [6, 7, 8, 9], list(range(13, 25))]


def test_without_rows_prompts_are_random_tokens_that_are_not_special():
    for prompt in text_prompts(None, 1024, 0):
        assert prompt.tokens.min() >= 108 and prompt.tokens.max() < 1024 and len(prompt.tokens) == 48


def test_rows_with_images_are_no_prompts_of_text():
    image = ImageInfo(path="a.png", sha256="", width=12, height=12, soft_tokens=1)
    rows = generate_rows([[5, BEGIN, IMAGE, END], [6, 7, 8, 9]], [[1] * 4] * 2, images=((image,), ()))
    assert [prompt.tokens.tolist() for prompt in text_prompts(rows, 1024, 0)] == [[6, 7, 8, 9]]


def test_a_prompt_with_a_image_is_the_document_around_the_first_and_has_its_shape(base):
    small = ImageInfo(path="gone.png", sha256="", width=24, height=12, soft_tokens=2)
    first = [20, BEGIN, *[IMAGE] * 55, END, 21]
    row = [*first, 22, BEGIN, *[IMAGE] * 2, END, 23, 30, 31]
    wide = replace(small, width=300, height=150, soft_tokens=55)
    rows = generate_rows([[1] * len(row), row], [[1] * len(row), [1] * (len(row) - 2) + [2] * 2], ((), (wide, small)))
    prompt = image_prompt(base, rows, 70, 0)
    assert prompt.tokens.tolist() == [*first, 22] and prompt.image_token == IMAGE
    assert prompt.image.soft_tokens == 55
    columns, lines = prompt.image.positions.max(axis=0) + 1
    assert columns * lines == 55 * (1 if base.variant.model_type == "gemma4_unified" else 9)
    assert len(prompt.image.values) == columns * lines and columns > lines


def test_without_rows_a_image_stands_among_random_tokens(base):
    prompt = image_prompt(base, None, 0, 0)
    places = np.flatnonzero(prompt.tokens == IMAGE)
    assert len(places) == prompt.image.soft_tokens == 64 and places[-1] - places[0] == 63
    assert prompt.tokens[places[0] - 1] == BEGIN and prompt.tokens[places[-1] + 1] == END


def test_a_prompt_of_a_long_document_is_its_first_token_and_what_is_around_the_first_targets():
    tokens = np.arange(1, 801).reshape(2, 400)
    rows = generate_rows(tokens, [[1] * 200 + [2] * 200, [1] * 300 + [0] * 100])
    rows.loss_mask[:] = 0
    rows.loss_mask[0, 190:200] = rows.loss_mask[1, 150:300] = 1  # none in the second
    first, none, last = text_prompts(rows, 1024, 0)
    assert first.tokens.tolist() == [1, *range(127, 201)] and first.targets.tolist() == [0] * 65 + [1] * 10
    assert none.tokens.tolist() == list(range(201, 329)) and not none.targets.any()
    assert last.tokens.tolist() == [401, *range(487, 614)] and last.targets.tolist() == [0] * 65 + [1] * 63


@pytest.mark.parametrize("there", [True, False])
def test_a_prompt_with_a_image_has_targets_where_it_is_the_real_one(base, tmp_path, there):
    file = tmp_path / "a.png"
    file.write_bytes(image_bytes(24, 24, seed=1))
    patching = read_patching(base.config, 70)
    seen = validate_image(str(file), patching)
    expected = scale(patchify(seen, patching), patching)
    file.write_bytes(file.read_bytes() if there else b"another")
    row = [20, BEGIN, *[IMAGE] * seen.soft_tokens, END, 21, 22]
    prompt = image_prompt(base, generate_rows([row], [[1] * len(row)], ((seen,),)), 70, 0)
    assert prompt.tokens.tolist() == row and prompt.image.values.shape == expected.values.shape
    assert np.array_equal(prompt.image.values, expected.values) is there
    assert prompt.targets.all() if there else prompt.targets is None
