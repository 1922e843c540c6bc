import contextlib
import json
import signal
import time
from pathlib import Path

import pytest

from gemsmith.checkpoints.steps import (
    add_checksum,
    check_files,
    checkpoint_steps,
    compare_checksums,
    read_or_damage,
    read_step_metadata,
    verify_checksum,
)
from gemsmith.errors import CorruptCheckpointError

METADATA = {"recipe": {"lora.rank": 4, "optimizer.learning_rate": 1e-8}, "steps": ['{"loss":1.5}'], "resumed_at": (2,)}
SEALED = add_checksum(METADATA, {"model_params": {"a": "float32[2] 00"}})


def test_what_was_sealed_comes_back():
    assert verify_checksum(json.loads(json.dumps(SEALED)))["steps"] == METADATA["steps"]


@pytest.mark.parametrize("bit", range(8))
def test_any_flipped_bit_of_sealed_metadata_is_found_or_changes_nothing(bit):
    text = json.dumps(SEALED).encode()
    for place in range(len(text)):
        try:
            changed = json.loads(text[:place] + bytes([text[place] ^ 1 << bit]) + text[place + 1 :])
        except ValueError:
            continue
        with contextlib.suppress(CorruptCheckpointError):
            assert verify_checksum(changed) == verify_checksum(SEALED), place


def test_metadata_without_checksums_is_read_as_it_is():
    assert verify_checksum({"recipe": {}}) == {"recipe": {}}
    compare_checksums({"recipe": {}}, "model_params", {"a": "anything"})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"a": "float32[2] 01"}, "a in model_params is not what was saved"),
        ({}, "a in model_params is not"),
        ({"a": "float32[2] 00", "b": "", "c": "", "d": "", "e": ""}, "b, c, d and 1 more in model_params are not"),
    ],
)
def test_tensors_that_differ_are_named(found, message):
    with pytest.raises(CorruptCheckpointError, match=message):
        compare_checksums(SEALED, "model_params", found)


def test_ctrl_c_while_a_step_is_read_is_not_its_damage():
    """Orbax makes an Exception of its own of whatever is raised in its reads."""

    def read():
        try:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.05)
        except BaseException as error:
            raise Exception("Encountered error while reading array") from error

    with pytest.raises(KeyboardInterrupt):
        read_or_damage(read)


def make_step(folder: Path, *names: str, committed: object = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "_CHECKPOINT_METADATA").write_text(
        json.dumps({"commit_timestamp_nsecs": committed, "custom_metadata": SEALED})
    )
    for name in names:
        (folder / name).touch()
    return folder


def test_a_step_counts_as_saved_whichever_of_its_files_is_gone(tmp_path):
    make_step(tmp_path / "1", "commit_success.txt")
    make_step(tmp_path / "2")  # as earlier versions of Orbax left it
    (make_step(tmp_path / "3", "commit_success.txt") / "_CHECKPOINT_METADATA").unlink()
    (make_step(tmp_path / "4", "commit_success.txt") / "_CHECKPOINT_METADATA").write_text("[]")
    make_step(tmp_path / "5", committed=None)  # half written, in a bucket
    for step, name in enumerate(("training.json", "adapter_model.safetensors", "adapter_config.json"), start=6):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / name).touch()
    make_step(tmp_path / "9.orbax-checkpoint-tmp", "commit_success.txt")
    (tmp_path / "10").touch()
    assert checkpoint_steps(tmp_path) == [1, 2, 3, 4, 6, 7, 8]
    assert checkpoint_steps(tmp_path / "none") == []


@pytest.mark.parametrize(
    "text",
    [None, "", "[]", "{}", "[1", '{"custom_metadata": []}'.replace("[]", "3"), json.dumps({"custom_mevadata": SEALED})],
)
def test_metadata_that_cannot_be_read_is_damage(tmp_path, text):
    file = make_step(tmp_path / "1") / "_CHECKPOINT_METADATA"
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"metadata is damaged|_CHECKPOINT_METADATA is (damaged|missing)"):
        read_step_metadata(tmp_path / "1")


def test_files_are_compared_by_their_digests(tmp_path):
    (tmp_path / "config").write_text("x")
    sealed = add_checksum({}, {"config": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"})
    check_files(tmp_path, sealed, ["config"])
    (tmp_path / "config").write_text("y")
    check_files(tmp_path, {}, ["config"])
    with pytest.raises(CorruptCheckpointError, match=r"^config is not what was saved$"):
        check_files(tmp_path, sealed, ["config"])
    with pytest.raises(CorruptCheckpointError, match=r"^its other is missing$"):
        check_files(tmp_path, {}, ["other"])
