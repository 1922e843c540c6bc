import inspect
from typing import get_args

import pytest

from gemsmith.errors import InputError
from gemsmith.launch.provider import LAUNCHES, Feature, Target, read_launch, write_launch
from gemsmith.launch.providers import TARGETS, cloud_run, tpu_vm


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
    (LAUNCHES / "big" / "launch.json").write_text("{}")
    with pytest.raises(InputError, match=r"launch\.json: is not a launch's record"):
        read_launch("big")


def test_modules_have_all_that_a_target_is_asked_for():
    asked = {name for name, value in vars(Target).items() if inspect.isfunction(value)} - {"__init__"}
    asked = {name for name in asked if not name.startswith("_")}
    assert len(asked) == 4
    assert len(TARGETS) > 3
    for module in TARGETS.values():
        assert all(callable(getattr(module, name)) for name in asked)
        assert {*get_args(Feature)} >= module.FEATURES
    assert TARGETS["cloud-run"] is cloud_run and TARGETS["tpu-vm"] is tpu_vm


def test_a_request_knows_its_bucket(launched):
    request = launched()
    assert request.bucket == "runs"
