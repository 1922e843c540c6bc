import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gemsmith.system.files import atomic_replace_dir, atomic_write, regular_file, sha256_file, sha256_json, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_write(file) as stream:
        stream.write("half")
        _ = 1 / 0
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_killed_process_has_left_of_a_file_goes_with_the_next_write_of_it(tmp_path):
    file = tmp_path / "data[1].json"
    with subprocess.Popen(["true"]) as ended:
        pass
    host, gone = os.uname().nodename, ended.pid
    begin = f".{file.name}.{host}."
    ours = {f".data.json.{host}.{gone}", f"{begin}{os.getppid()}", f"{begin}x", f"{file.name}.{host}.{gone}"}
    ours |= {f".{file.name}.other-host.{gone}"}  # which may well be writing there
    for name in {f"{begin}{gone}", f"{begin}{2**70}", *ours}:
        (tmp_path / name).touch()
    write_text(file, "new")
    assert {path.name for path in tmp_path.iterdir()} == {file.name, *ours}


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "merged"
    for text in ("first", "second"):
        with atomic_replace_dir(folder) as beside:
            (beside / "file").write_text(text)
    with pytest.raises(ZeroDivisionError), atomic_replace_dir(folder) as beside:
        (beside / "file").write_text("half")
        _ = 1 / 0
    assert (folder / "file").read_text() == "second"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_lost_between_two_renames_is_put_back(tmp_path):
    folder = tmp_path / "merged"
    (tmp_path / ".merged.old").mkdir()
    (tmp_path / ".merged.old" / "file").write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_replace_dir(folder):
        _ = 1 / 0
    assert (folder / "file").read_text() == "old"


def test_ctrl_c_between_the_two_renames_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "old").touch()
    rename = Path.rename

    def interrupted(self, target):
        if self.name == ".merged.partial":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_replace_dir(folder) as beside:
        (beside / "new").touch()
    assert [path.name for path in folder.iterdir()] == ["old"] and [*tmp_path.iterdir()] == [folder]


def test_a_folder_that_another_process_begins_while_the_old_one_is_deleted_is_left_alone(tmp_path, monkeypatch):
    folder, another = tmp_path / "merged", tmp_path / ".merged.partial"
    rmtree = shutil.rmtree

    def begun_meanwhile(path, **options):
        rmtree(path, **options)
        if (folder / "new").exists() and path.name == ".merged.old":
            another.mkdir()

    monkeypatch.setattr(shutil, "rmtree", begun_meanwhile)
    with atomic_replace_dir(folder) as beside:
        (beside / "new").touch()
    assert another.exists()


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "a\0b", "link"])
def test_a_pipe_a_device_and_a_name_with_a_nul_are_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for read in (regular_file, sha256_file):
        with pytest.raises(OSError, match=r"is not a regular file|is no file's name"):
            read(tmp_path / name)


def test_a_file_is_taken_up_to_the_bytes_that_are_allowed(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10))
    assert regular_file(tmp_path / "file", most_bytes=10) == tmp_path / "file"
    with pytest.raises(OSError, match="has 10 bytes, more than 9"):
        regular_file(tmp_path / "file", most_bytes=9)
    with pytest.raises(FileNotFoundError):
        regular_file(Path("/nowhere/file"))


def test_a_hash_of_json_does_not_depend_on_the_order_of_keys():
    assert sha256_json({"a": 1, "b": [None]}) == sha256_json({"b": [None], "a": 1}) != sha256_json({"a": 1})
