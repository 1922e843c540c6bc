import hashlib
import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file

from gemsmith.arch import find_variant
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.safetensors import check_digest, fingerprint, read_header, write_tensors
from gemsmith.errors import CheckpointError
from tiny_checkpoints import make_checkpoint


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


@pytest.fixture
def written(tmp_path):
    """A file of two tensors that `write_tensors` wrote, and the tensors."""
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.float32([1.5])}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    file = tmp_path / "x.safetensors"
    assert write_tensors(file, shapes, tensors.__getitem__, {"k": "v"}).sha256 == (
        hashlib.sha256(file.read_bytes()).hexdigest()
    )
    return file, tensors


def test_what_was_written_is_read_by_the_library_and_here_with_its_digest(written):
    file, tensors = written
    places, metadata = read_header(file)
    assert metadata["k"] == "v" and len(metadata["gemsmith_sha256"]) == 64
    check_digest(places, metadata, "a")
    check_digest(places, metadata, "x")
    read = load_file(file)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(places[name].read(), tensor)
        np.testing.assert_array_equal(read[name], tensor)


def test_one_flipped_bit_of_a_tensor_is_found(written):
    file, _ = written
    before = fingerprint(read_header(file)[0])
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    places, metadata = read_header(file)
    with pytest.raises(CheckpointError, match=r"^x is damaged: SHA-256 "):
        check_digest(places, metadata, "x")
    assert fingerprint(places) != before


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("F32", [1], [0, 4]), ("F32", [1], [0, 4])], "tensors overlap or leave gaps"),
        ([("F32", [1], [0, 8])], "t0 has 8 bytes, its shape .* in F32 needs 4"),
        ([("F99", [1], [0, 4])], "its entry for t0 is damaged or of an unknown dtype"),
        ([("F32", [-1], [0, -4])], "its entry for t0 is damaged"),
        ([("F32", ["x", 10**12], [0, 4])], "its entry for t0 is damaged"),
        ([("F32", [10**200] * 40, [0, 4])], "its entry for t0 is damaged"),
        ([("F32", [1] * 9, [0, 4])], "its entry for t0 is damaged"),
        ([("F32", [1] * 8, [0, 8])], "t0 has 8 bytes"),
        ([("F32", [3], [0, 12])], "bytes, its header says"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(tmp_path, entries, message):
    keys = ("dtype", "shape", "data_offsets")
    header = {f"t{place}": dict(zip(keys, entry, strict=True)) for place, entry in enumerate(entries)}
    text = json.dumps(header).encode()
    end = max(entry[2][1] for entry in entries)
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end if end in (4, 8) else 8))
    with pytest.raises(CheckpointError, match=message):
        read_header(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000, "is nested too deeply"),
        ('{"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "t": 1}', "t is given twice; keep one"),
        ('{"t": {"dtype": "F32", "shape": [1' + "0" * 4000 + '], "data_offsets": [0, 4]}}', "a number of 4,001 digits"),
        ('{"__metadata__": {"a": 5}}', "is damaged"),
    ],
)
def test_a_header_that_json_takes_silently_or_not_at_all_is_refused(tmp_path, text, said):
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(4))
    with pytest.raises(CheckpointError, match=f"its safetensors header is damaged.*{said}|{said}"):
        read_header(file)


def test_a_pipe_in_place_of_weights_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot be read \(is not a regular file\)"):
        read_header(tmp_path / "x.safetensors")
