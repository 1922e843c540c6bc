"""The server for tests does to a client what it is told."""

import http.client
import json
import urllib.error
import urllib.request

import pytest

from support.hostile_server import NONCE, chat, hostile_server


def ask(url: str, body: object) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture
def hostile():
    with hostile_server() as server:
        yield server


def test_it_says_yes_until_told_otherwise_and_notes_what_was_asked(hostile):
    assert ask(hostile.url, {"n": 1})["choices"][0]["message"]["content"] == "yes"
    hostile.deed = lambda asked: chat(asked["n"], "length")
    choice = ask(hostile.url, {"n": 2})["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (2, "length")
    assert hostile.asked == [{"n": 1}, {"n": 2}]


def test_an_answer_that_is_cut_ends_early(hostile):
    hostile.deed = lambda asked: "cut"
    with pytest.raises(http.client.IncompleteRead):
        ask(hostile.url, {})


def test_it_starts_over_on_another_port_and_tells_its_nonce(hostile):
    before = hostile.url
    ask(before, {})
    hostile.forget()
    assert hostile.url != before and hostile.asked == []
    with urllib.request.urlopen(hostile.url, timeout=60) as answer:
        assert json.load(answer)["data"] == [{"id": NONCE}]


def test_the_process_of_its_server_runs_until_it_is_said_to_have_died(hostile):
    server = hostile.server(name="tuned")
    assert (server.model, server.url, server.process.poll()) == ("tuned", hostile.url, None)
    hostile.died.set()
    assert server.process.poll() == server.process.returncode == 3


def test_once_it_has_vanished_nobody_listens_until_it_forgets(hostile):
    hostile.vanish()
    with pytest.raises(urllib.error.URLError):
        ask(hostile.url, {})
    hostile.forget()
    assert ask(hostile.url, {})["choices"]
