import hashlib
import os
import threading
from pathlib import Path

import pytest

from gemsmith.runs import checksums as sums
from gemsmith.runs.checksums import changed_files
from gemsmith.runs.records import FileSum


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "merged"
    made.mkdir()
    for number in range(5):
        (made / f"{number}.safetensors").write_bytes(bytes([number]) * 1000)
    return made


def recorded(folder: Path) -> list[FileSum]:
    return [
        FileSum(name=file.name, bytes=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
        for file in sorted(folder.iterdir())
    ]


def test_an_untouched_folder_has_no_problems(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_READ_BYTES", 64)
    assert changed_files(folder, recorded(folder)) == []


def test_every_way_in_which_a_file_can_differ_is_named(folder: Path) -> None:
    before = recorded(folder)
    (folder / "0.safetensors").write_bytes(b"\1" + bytes(999))
    (folder / "1.safetensors").write_bytes(bytes([1]) * 999)
    (folder / "2.safetensors").unlink()
    (folder / "3.safetensors").unlink()
    (folder / "3.safetensors").symlink_to("nowhere")
    (folder / "4.safetensors").unlink()
    os.mkfifo(folder / "4.safetensors")
    (folder / "more").mkdir()
    (folder / "more" / "extra.json").write_text("{}")
    assert changed_files(folder, before) == [
        "merged/2.safetensors is missing",
        "merged/more/extra.json was not exported",
        "merged/0.safetensors was changed since",
        "merged/1.safetensors was changed since",
        "merged/3.safetensors was changed since",
        "merged/4.safetensors was changed since",
    ]
    assert "merged/0.safetensors is missing" in changed_files(folder.parent / "gone" / "merged", before)


def test_ctrl_c_ends_the_reading_of_large_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, told = threading.Event(), list[bool]()

    def endless(_path: Path, _recorded: FileSum, stopped: threading.Event) -> bool:
        read.set()
        told.append(stopped.wait(60))
        return False

    def interrupted(*_: object, **__: object) -> None:
        assert read.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(sums, "_is_same", endless)
    monkeypatch.setattr("concurrent.futures._base.Future.result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        changed_files(folder, recorded(folder))
    assert told and all(told)
