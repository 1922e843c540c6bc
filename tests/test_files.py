import shutil
from pathlib import Path

import pytest

from gemsmith.files import replacing, replacing_folder


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(file) as stream:
        stream.write("half")
        _ = 1 / 0
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "merged"
    for text in ("first", "second"):
        with replacing_folder(folder) as beside:
            (beside / "file").write_text(text)
    with pytest.raises(ZeroDivisionError), replacing_folder(folder) as beside:
        (beside / "file").write_text("half")
        _ = 1 / 0
    assert (folder / "file").read_text() == "second"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_lost_between_two_renames_is_put_back(tmp_path):
    folder = tmp_path / "merged"
    (tmp_path / ".merged.old").mkdir()
    (tmp_path / ".merged.old" / "file").write_text("old")
    with pytest.raises(ZeroDivisionError), replacing_folder(folder):
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
    with pytest.raises(KeyboardInterrupt), replacing_folder(folder) as beside:
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
    with replacing_folder(folder) as beside:
        (beside / "new").touch()
    assert another.exists()
