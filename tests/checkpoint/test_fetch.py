import shutil

import numpy as np

from gemsmith.checkpoint import open_checkpoint


def test_a_source_that_is_nothing_is_refused(tmp_path, refused):
    assert "is not a folder" in refused(tmp_path / "not" / "there")


def test_a_bucket_is_copied_once_and_opened(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("GEMSMITH_CACHE", str(tmp_path / "cache"))
    source = tiny_checkpoint("tiny-12b")
    first = open_checkpoint(f"file://{source}")
    stamps = {file: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    again = open_checkpoint(f"file://{source}")
    assert first.folder != source
    assert {file: file.stat().st_mtime_ns for file in again.folder.iterdir()} == stamps
    for name, place in first.places.items():
        np.testing.assert_array_equal(place.read(), open_checkpoint(str(source)).read(name))


def test_a_hub_id_is_taken_from_the_hub_cache(tiny_checkpoint, tmp_path, monkeypatch):
    """The cache's layout is the hub client's own; nothing is asked of the network."""
    snapshot = tmp_path / "models--google--gemma-4-tiny" / "snapshots" / "abc"
    shutil.copytree(tiny_checkpoint("tiny-12b"), snapshot)
    refs = tmp_path / "models--google--gemma-4-tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert open_checkpoint("google/gemma-4-tiny").folder == snapshot


def test_a_hub_id_that_cannot_be_reached_is_one_line(monkeypatch, tmp_path, refused):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "could not be downloaded" in refused("google/gemma-4-nothing")
