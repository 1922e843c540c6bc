"""The script that stderr goes through while several hosts train."""

import subprocess
import sys

import pytest

from gemsmith.train.jax import lost_hosts

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


@pytest.mark.parametrize("text", [OTHER, LEFT, SAVING, "train  step 3/4\n\n", ""])
def test_all_else_is_passed_on(text):
    assert said(text) == text
