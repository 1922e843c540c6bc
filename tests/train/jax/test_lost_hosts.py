"""The script that stderr goes through while several hosts train."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from gemsmith.train.jax import distributed, lost_hosts

SILENT = """\
train  step 3/4
E1126 21:09:50.1 15228 coordination_service.cc:1549] [105] Use error polling: UNAVAILABLE: The following tasks are \
unhealthy (stopped sending heartbeats):
1
The tasks have crashed.
F1126 21:09:50.1 15244 client.h:80] Terminating process because the JAX distributed service detected fatal errors.
*** Check failure stack trace: ***
"""
GONE = """\
train  step 3/4
E1126 21:11:16.8 20741 coordination_service_agent.cc:289] Polled an error from coordination service.
F1126 21:11:16.8 20741 client.h:80] Terminating process because the JAX distributed service detected fatal errors.
:UNKNOWN:Error received from peer {grpc_message:"Socket closed", grpc_status:14}
"""
BARRIER = SILENT.replace("stopped sending heartbeats):\n1", "Task 2 heartbeat timeout.")
SAVING = """\
train  step 3/4
ERROR:absl:[process=0] Failed to run 4 Handler Commit operations or the Commit callback in background save thread.
Traceback (most recent call last):
"""
IN_A_SAVE = SAVING + SILENT.partition("\n")[2]
TWICE = """\
E1126 21:09:50.1 15228 coordination_service.cc:518] [105] 1 unexpectedly tried to connect with a different \
incarnation. It has likely restarted.
""" + SILENT.partition("\n")[2]
KICKED = """\
F1126 21:09:50.1 15244 client.h:80] Terminating process because the JAX distributed service detected fatal errors. \
absl::Status: ALREADY_EXISTS: Aborted connect attempt as there is a request from a newer incarnation.
RPC: /xla.coordination.CoordinationService/RegisterTask
"""
OTHER = "F1126 21:11:16.8 20741 layout.cc:80] Check failed: a == b\n*** Check failure stack trace: ***\nhalf a line"
LEFT = SILENT.replace("Terminating process because", "Reconnecting to")


def said(text: str) -> str:
    command = [sys.executable, "-I", "-S", lost_hosts.__file__, "3"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(("text", "host"), [(SILENT, 1), (GONE, 0), (BARRIER, 2), (IN_A_SAVE, 1)])
def test_of_a_lost_host_one_line_says_which(text, host):
    lines = said(text).splitlines()
    assert lines[0] == "train  step 3/4" and len(lines) == 2
    assert lines[1].startswith(f"error: training: host {host} of 3 is lost: it was killed or suspended, has failed, or")


def test_of_a_host_that_was_started_twice_one_line_says_so():
    for text, host in ((TWICE, "host 1"), (KICKED, "this host")):
        lines = said(text).splitlines()
        assert len(lines) == 1 and lines[0].startswith(f"error: training: {host} of 3 was started twice, or again"), (
            lines
        )


@pytest.mark.parametrize("text", [OTHER, LEFT, SAVING, "train  step 3/4\n\n", ""])
def test_all_else_is_passed_on(text):
    assert said(text) == text


@pytest.mark.parametrize(("longest_s", "ended_after"), [(600.0, 121), (9000.0, 1801)])
def test_a_host_is_let_live_as_long_as_its_steps_may_take(monkeypatch, longest_s, ended_after):
    """Of which `ended_after` looks, five seconds apart, find no step."""
    said, looks = {}, []

    class Store:
        def key_value_set(self, key, value, allow_overwrite):
            said[key] = value

        def key_value_dir_get(self, _):
            return [*said.items(), ("gemsmith/progress/1", "0 9999")]

    def look(seconds):
        looks.append(seconds)
        if len(looks) == 100:
            distributed.note_progress()  # as the first host does, and the other does not

    class Ended(Exception):  # noqa: N818
        pass

    def end(code):
        raise Ended(code)

    written = []
    monkeypatch.setattr(distributed, "_progress", SimpleNamespace(count=0, longest_s=longest_s))
    monkeypatch.setattr(distributed, "global_state", SimpleNamespace(client=Store()))
    monkeypatch.setattr("time.sleep", look)
    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("os.write", lambda _, text: written.append(text.decode()))
    with pytest.raises(Ended):
        distributed._end_with_a_host_that_hangs()
    assert len(looks) == 100 + ended_after
    assert written[0].startswith(f"error: training: host 1 of 2 hangs, without a step for {longest_s / 60:g} minutes")
