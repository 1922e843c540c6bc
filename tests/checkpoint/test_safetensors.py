import numpy as np
import pytest

from gemsmith.checkpoint import open_checkpoint
from gemsmith.errors import CheckpointError
from gemsmith.testing.tiny import make_checkpoint
from gemsmith.zoo import find_variant


def test_tensors_read_as_transformers_reads_them(tiny_checkpoint):
    from safetensors import safe_open

    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-31b", "bfloat16")))
    for name, place in checkpoint.places.items():
        with safe_open(place.file, "pt") as file:
            expected = file.get_tensor(name).float().numpy()
        np.testing.assert_array_equal(place.read().astype(np.float32), expected)
        np.testing.assert_array_equal(place.copy().astype(np.float32), expected)


def test_a_copy_of_a_tensor_whose_file_was_shortened_is_refused(tmp_path):
    place = next(
        iter(open_checkpoint(str(make_checkpoint(find_variant("tiny-12b"), tmp_path / "tiny"))).places.values())
    )
    with place.file.open("rb+") as file:
        file.truncate(place.end - 1)
    with pytest.raises(CheckpointError, match="ended early; it was changed while it was read"):
        place.copy()
