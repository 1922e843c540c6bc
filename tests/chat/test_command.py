"""What `gemsmith chat` is told, and whom it then talks to."""

import socket
import subprocess
import sys

import pytest

from gemsmith.chat import command
from gemsmith.chat.stream import Sampling
from gemsmith.errors import MachineError

NOTHING = {"sampling": Sampling(), "system": "", "web": False, "port": None}


@pytest.fixture
def told(monkeypatch):
    seen = {}
    monkeypatch.setattr(command, "talk", lambda voices, sampling, **more: seen.update(voices=voices, **more))
    return seen


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_an_address_may_end_as_an_openai_client_wants_it(told, url):
    command.chat_with_url(url, ["a", "b"], **NOTHING)
    assert [(voice.url, voice.model) for voice in told["voices"]] == [("http://host:1", "a"), ("http://host:1", "b")]


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = [
            "chat",
            "--url",
            "http://127.0.0.1:9",
            "--model",
            "x",
            "--web",
            "--port",
            str(taken.getsockname()[1]),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "gemsmith", *arguments], check=False, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --port: ") and done.stderr.count("\n") == 1
    assert MachineError.exit_code == 2
