import io
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemsmith.errors import EngineError, InputError, MachineError, Terminated
from gemsmith.launch.provider import read_launch
from gemsmith.launch.providers import cloud_run
from gemsmith.launch.submit import _confirm, print_files, submit
from gemsmith.system.console import open_console
from support.fault_points import state

MEMBER = "serviceAccount:gemsmith@demo-project.iam.gserviceaccount.com"
POLICY = {"bindings": [{"role": f"roles/storage.object{kind}", "members": [MEMBER]} for kind in ("User", "Viewer")]}
FINE = [
    ("auth list", 0, "me@example.com\n"),
    ("services list --enabled", 0, "run.googleapis.com\nstorage.googleapis.com\n"),
    ("get-iam-policy", 0, json.dumps(POLICY)),
    ("buckets describe", 0, "US-CENTRAL1\n"),
]
CHANGES = ("replace", "execute", "cp", "create", "delete")


def changes(calls):
    return [call for call in calls() if set(call) & {*CHANGES}]


def submitted(request, **options):
    return submit(
        request, cloud_run, "cloud-run", console=open_console(), **({"max_usd": None, "assume_yes": True} | options)
    )


def test_what_is_submitted_is_what_is_printed(launched, fake_tools, tmp_path):
    calls = fake_tools(*FINE)
    printed = {path.name: path.read_bytes() for path in print_files(launched(), cloud_run, tmp_path / "out")}
    record = submitted(launched())
    there = {path.name: path.read_bytes() for path in Path("launches/big").iterdir() if path.name != "launch.json"}
    assert there == printed and record.files.keys() == printed.keys()
    assert [call[1:4] for call in changes(calls)] == [
        ["storage", "cp", "--recursive"],
        ["run", "jobs", "replace"],
        ["run", "jobs", "execute"],
    ]
    assert read_launch("big").state == "submitted"


def test_nothing_is_created_where_the_preflight_fails(launched, fake_tools):
    calls = fake_tools(("buckets describe", 1, "not found"), *FINE)
    with pytest.raises(MachineError, match=r"2 of .* checks failed"):
        submitted(launched())
    assert not changes(calls) and not Path("launches").exists()


def test_a_bill_above_the_limit_is_refused_before_anything_is_asked(launched, fake_tools):
    calls = fake_tools(*FINE)
    with pytest.raises(InputError, match=r"^--max-usd 5: this launch can cost 32\.96 USD"):
        submitted(launched(timeout_hours=2), max_usd=5)
    assert not calls()


def test_without_a_terminal_yes_is_needed(launched, fake_tools, monkeypatch):
    calls = fake_tools(*FINE)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(InputError, match=r"^--yes: is missing"):
        submitted(launched(), assume_yes=False)
    assert not changes(calls)
    assert not Path("launches/big/launch.json").exists()


def test_a_name_that_is_taken_is_refused(launched, fake_tools):
    fake_tools(*FINE)
    submitted(launched())
    with pytest.raises(InputError, match="a launch of that name is submitted; run gemsmith launch clean big"):
        submitted(launched())


def test_a_submit_that_fails_half_way_is_remembered(launched, fake_tools):
    fake_tools(("jobs execute", 1, "no quota"), *FINE)
    with pytest.raises(EngineError, match=r"submit\.sh ended with 1"):
        submitted(launched())
    assert read_launch("big").state == "failed"


def test_where_a_submit_is_told_to_stop_nothing_of_it_goes_on(launched, fake_tools, tmp_path, monkeypatch):
    fake_tools(*FINE)
    tool = tmp_path / "tools" / "gcloud"
    slow = f'#!/bin/sh\ncase "$*" in *execute*) sh -c "echo \\$\\$ >{tmp_path}/pid; sleep 60; true"; exit;; esac\n'
    tool.write_text(slow + tool.read_text())

    def stop(*_: object) -> None:
        raise Terminated

    def send() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=send).start()
    with pytest.raises(Terminated):
        submitted(launched())
    assert read_launch("big").state == "failed"
    process, deadline_s = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while Path(f"/proc/{process}").exists() and state(process) not in "ZX":
        assert time.monotonic() < deadline_s, "it goes on"
        time.sleep(0.01)


def test_a_folder_with_other_files_is_not_written_into(launched, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds thesis\.txt"):
        print_files(launched(), cloud_run, tmp_path / "out")


def test_a_no_is_told_as_one(monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    with pytest.raises(InputError, match=r"^the answer was no, so nothing was done; answer yes to submit$"):
        _confirm("Spend up to 1.00 USD?", assume_yes=False, to="submit")
