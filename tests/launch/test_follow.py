import io

import pytest

from gemsmith.errors import EngineError, InputError
from gemsmith.launch.commands import follow_command, leftover_resources
from gemsmith.launch.provider import read_launch, write_launch
from gemsmith.launch.submit import clean, show, stop
from gemsmith.system.console import open_console


@pytest.fixture
def launch(tmp_path, monkeypatch, launch_record):
    monkeypatch.chdir(tmp_path)
    write_launch(launch_record)
    return launch_record


def test_stop_cancels_what_runs_and_leaves_the_rest(launch, fake_tools):
    calls = fake_tools(("executions list", 0, "big-1\nbig-2\n"))
    stop(launch, assume_yes=True, console=open_console())
    removed = [call for call in calls() if "cancel" in call or "delete" in call]
    assert [(call[4], call[5]) for call in removed] == [("cancel", "big-1"), ("cancel", "big-2")]
    assert read_launch("big").state == "submitted"


def test_clean_says_what_outlives_it(launch, fake_tools, capfd):
    fake_tools()
    clean(launch, assume_yes=True, console=open_console())
    assert read_launch("big").state == "cleaned"
    assert "kept: gs://runs/big, the run" in capfd.readouterr().err
    assert len(leftover_resources(launch)) == 4
    assert len(leftover_resources(launch.model_copy(update={"secret": None}))) == 3


def test_what_is_still_there_is_not_called_cleaned(launch, fake_tools):
    fake_tools(("jobs list", 0, "big\n"))
    with pytest.raises(EngineError, match="big: still there: big"):
        clean(launch, assume_yes=True, console=open_console())
    assert read_launch("big").state == "submitted"


def test_what_cannot_be_listed_is_not_taken_for_gone(launch, fake_tools):
    fake_tools(("jobs list", 1, "permission denied"))
    with pytest.raises(EngineError, match=r"job: cannot be listed \(permission denied\)"):
        clean(launch, assume_yes=True, console=open_console())


def test_without_a_terminal_yes_is_needed(launch, fake_tools, monkeypatch):
    calls = fake_tools(("executions list", 0, "big-1\n"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(InputError, match="--yes: is missing"):
        stop(launch, assume_yes=False, console=open_console())
    assert not [call for call in calls() if "cancel" in call]


def test_status_and_logs_are_the_target_s_own(launch, fake_tools):
    calls = fake_tools()
    show(follow_command(launch, "status"))
    show(follow_command(launch.model_copy(update={"target": "tpu-vm", "zone": "z"}), "logs"))
    assert calls()[0][1:5] == ["run", "jobs", "executions", "list"]
    assert calls()[1] == ["gcloud", "storage", "cat", "gs://runs/big/logs/worker-0.txt"]
