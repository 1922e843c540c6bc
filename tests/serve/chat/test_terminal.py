"""A conversation in the terminal, with prompts from a pipe."""

import io

import pytest

from gemsmith.errors import EngineError
from gemsmith.serve.chat.terminal import ChatSetup, chat_loop
from gemsmith.serve.client.stream import SamplingParams
from gemsmith.tasks.base import Question
from gemsmith.tasks.messages import text_message

ROWS = [
    Question(
        messages=(text_message("system", "Be short."), text_message("user", "2 + 2?")),
        expected="4",
        origin="rows.jsonl",
    )
]


@pytest.fixture
def say(monkeypatch, capsys, speaker):
    def said(*lines, labels=("tuned",), **options):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        voices = [speaker.voice(label) for label in labels]
        chat_loop(ChatSetup(voices=voices, title="", sampling=SamplingParams(), **options))
        return capsys.readouterr()

    return said


def test_answers_go_to_stdout_and_their_speed_to_stderr(say):
    out, err = say("hi")
    assert out == "Hello\n"
    assert "TTFT" in err and "7 tokens" in err


def test_the_model_is_sent_what_was_said_before(say, speaker):
    say("one", "two", system="Be kind.")
    assert [turn["content"] for turn in speaker.asked[1]["messages"]] == ["Be kind.", "one", "Hello", "two"]


def test_a_new_conversation_forgets_and_another_system_prompt_does_too(say, speaker):
    say("one", "/new", "two", "/system Be brief.", "three")
    assert [turn["content"] for turn in speaker.asked[1]["messages"]] == ["two"]
    assert [turn["content"] for turn in speaker.asked[2]["messages"]] == ["Be brief.", "three"]


def test_each_voice_sees_its_own_answers(say, speaker):
    out, err = say("one", labels=("base", "tuned"))
    assert [asked["model"] for asked in speaker.asked] == ["demo-base", "demo-tuned"]
    assert out == "Hello\nHello\n" and "[base]" in err and "[tuned]" in err


def test_a_held_out_row_is_asked_with_its_system_prompt_and_its_answer_shown(say, speaker):
    _, err = say("/row 1", rows=lambda: ROWS)
    assert [turn["content"] for turn in speaker.asked[0]["messages"]] == ["Be short.", "2 + 2?"]
    assert "expected: 4" in err


@pytest.mark.parametrize("given", ["0", "2", "x", ""])
def test_a_row_that_is_not_there_is_said(say, speaker, given):
    _, err = say(f"/row {given}", rows=lambda: ROWS)
    assert "allowed: 1 to 1" in err and not speaker.asked


def test_what_a_terminal_would_act_on_is_spelled_out(say, speaker):
    speaker.pieces = ("\x1b[31mred",)
    assert say("hi").out == "\\x1b[31mred\n"


def test_a_server_that_fails_ends_a_piped_conversation(say, speaker):
    speaker.status = 500
    with pytest.raises(EngineError, match="answered 500"):
        say("hi")
