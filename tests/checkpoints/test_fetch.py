import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fake_cloud.bucket import bucket_server
from gemsmith.checkpoints.folder import open_checkpoint


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


READ = "import sys; from gemsmith.checkpoints.folder import fetch_folder; print(fetch_folder(sys.argv[1]))"


@pytest.mark.slow
def test_a_bucket_that_cuts_its_answers_gives_every_byte(tiny_checkpoint, tmp_path):
    """tensorstore itself takes an answer that was cut within its head for an empty object."""
    source = tiny_checkpoint("tiny-12b")
    with bucket_server(fault_share=0.3, seed=3) as bucket:
        for file in source.iterdir():
            bucket.objects[f"base/{file.name}"] = (1, file.read_bytes())
        environment = os.environ | bucket.environment | {"GEMSMITH_CACHE": str(tmp_path)}
        command = [sys.executable, "-c", READ, "gs://bucket/base"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for file in Path(done.stdout.strip()).glob("[!.]*"):
        assert file.read_bytes() == (source / file.name).read_bytes()
    assert sum(bucket.faults.values()) > 3


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
