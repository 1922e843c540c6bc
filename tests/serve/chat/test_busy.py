"""Servers that say that they are busy: asked again, no sooner than they say, and not without end."""

from types import SimpleNamespace

import httpx
import pytest

from gemsmith.errors import EngineError, InputError
from gemsmith.serve.client import endpoint
from gemsmith.serve.client.endpoint import WAITS_S, ask_until_ready, find_models
from gemsmith.serve.client.stream import SamplingParams, stream_answer

ASKED = [{"role": "user", "content": "hi"}]


@pytest.fixture
def waits(monkeypatch):
    """The waits so far, none of which takes time."""
    found = []
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(sleep=found.append))
    return found


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_asked_again_no_sooner_than_it_says(status, waits):
    answers = [
        httpx.Response(status, headers={"Retry-After": "7"}),
        httpx.Response(status, headers={"Retry-After": "3600"}),
        httpx.Response(status),
        httpx.Response(200),
    ]
    assert ask_until_ready(lambda: answers.pop(0)).status_code == 200
    assert waits == [7.0, endpoint.MOST_WAIT_S, WAITS_S[2]]


def test_other_answers_are_believed_at_once(waits):
    for status in (200, 400, 401, 404, 500):
        assert ask_until_ready(lambda status=status: httpx.Response(status)).status_code == status
    assert waits == []


def test_a_server_that_stays_busy_is_given_up_with_its_answer(waits, speaker, monkeypatch):
    speaker.status = 503
    with pytest.raises(EngineError, match=r"demo-tuned at .* answered 503"):
        list(stream_answer(speaker.voice(), ASKED, SamplingParams()))
    assert len(speaker.asked) == len(WAITS_S) + 1 and waits == [*WAITS_S]

    async def refuse(*_, **__):
        return httpx.Response(502)

    monkeypatch.setattr(endpoint, "ask_whole", refuse)
    with pytest.raises(InputError, match="http 502"):
        find_models(speaker.url, ())
    assert waits == 2 * [*WAITS_S]


def test_a_chat_goes_on_once_the_server_has_room(speaker, monkeypatch):
    def sleep(_):
        speaker.status = 200

    speaker.status = 429
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(sleep=sleep))
    assert [*stream_answer(speaker.voice(), ASKED, SamplingParams())][-1].text == "Hello"
    assert len(speaker.asked) == 2
