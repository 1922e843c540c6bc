import pytest

from gemsmith.errors import InputError
from gemsmith.launch.provider import launch_folder, read_launch, write_launch


def test_a_record_is_read_as_it_was_written(tmp_path, monkeypatch, launch_record):
    monkeypatch.chdir(tmp_path)
    write_launch(launch_record)
    assert read_launch("big") == launch_record


def test_a_launch_that_is_not_there_or_damaged_is_one_line(tmp_path, monkeypatch, launch_record):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^launch big: .*does not exist; there are none in this folder$"):
        read_launch("big")
    write_launch(launch_record)
    with pytest.raises(InputError, match=r"^launch bug: .*\(did you mean big\?\); there are: big$"):
        read_launch("bug")
    (launch_folder("big") / "launch.json").write_text("{}")
    with pytest.raises(InputError, match=r"launch\.json: is not a launch's record"):
        read_launch("big")
