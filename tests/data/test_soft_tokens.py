import json
import shutil

import numpy as np
import pytest

from gemsmith.data.tokenize import ImageTokenIds, open_tokenizer, place_soft_tokens, read_image_tokens
from gemsmith.errors import CheckpointError

TOKENS = ImageTokenIds(image=9, begin=7, end=8)


def test_each_placeholder_becomes_the_soft_tokens_of_its_image():
    ids, origin = place_soft_tokens(np.array([5, 9, 6, 9, 9], np.int32), [2, 1, 3], TOKENS)
    assert ids.tolist() == [5, 7, 9, 9, 8, 6, 7, 9, 8, 7, 9, 9, 9, 8] and ids.dtype == np.int32
    assert origin.tolist() == [0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 4, 4, 4, 4]


def test_ids_without_images_stay_as_they_are():
    ids, origin = place_soft_tokens(np.array([5, 6], np.int32), [], TOKENS)
    assert ids.tolist() == [5, 6] and origin.tolist() == [0, 1]


def test_the_ids_are_those_of_the_config(image_checkpoint):
    tokenizer = open_tokenizer(image_checkpoint)
    assert read_image_tokens(image_checkpoint, tokenizer) == ImageTokenIds(image=10, begin=11, end=12)


@pytest.mark.parametrize(
    ("number", "message"),
    [(None, "has no boi_token_id"), (364, "boi_token_id of its config.json, 364, is no added token"), (5000, "5000")],
)
def test_a_checkpoint_whose_tokens_do_not_fit_is_refused(number, message, image_checkpoint, tmp_path):
    folder = shutil.copytree(image_checkpoint, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text()) | {"boi_token_id": number}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        read_image_tokens(folder, open_tokenizer(folder))
