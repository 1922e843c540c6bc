"""An answer as it is streamed, whole and broken."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gemsmith.data.chat_template import settle_text
from gemsmith.data.documents import Document
from gemsmith.data.tokenize import check_prompts, open_renderer
from gemsmith.errors import EngineError
from gemsmith.serve.chat.terminal import make_content, settle_prompts
from gemsmith.serve.client.stream import ChatModel, SamplingParams, StreamedAnswer, describe_speed, stream_answer
from gemsmith.tasks.messages import text_message
from support.cases import each

ASKED = [{"role": "user", "content": "hi"}]


def last(speaker, **sampling):
    return list(stream_answer(speaker.voice(), ASKED, SamplingParams(**sampling)))[-1]


def test_the_answer_grows_and_ends_with_the_servers_count_of_tokens(speaker):
    answers = list(stream_answer(speaker.voice(), ASKED, SamplingParams()))
    assert [answer.text for answer in answers] == ["Hel", "Hello", "Hello"]
    assert [answer.ended for answer in answers] == [None, None, "stop"]
    assert [answer.tokens for answer in answers] == [1, 2, 7]


def test_what_is_asked_for_is_what_is_sent(speaker):
    last(speaker, temperature=0.5, top_p=0.9, max_tokens=3, seed=4)
    (asked,) = speaker.asked
    assert {key: asked[key] for key in ("model", "messages", "temperature", "top_p", "max_tokens", "seed")} == {
        "model": "demo-tuned",
        "messages": ASKED,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 3,
        "seed": 4,
    }


def test_a_key_for_any_openai_server_is_sent_where_there_is_none_of_vllm(speaker, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    last(speaker)
    assert speaker.keys == ["Bearer theirs"]


@pytest.mark.parametrize(("status", "asked"), [(400, 2), (422, 2), (404, 1), (500, 1)])
def test_a_server_that_refuses_so_many_tokens_is_asked_once_more_for_what_it_has_room_for(speaker, status, asked):
    speaker.status = status
    with pytest.raises(EngineError, match=f"answered {status}"):
        last(speaker)
    assert [request.get("max_tokens") for request in speaker.asked] == [512, None][:asked]


def test_the_first_token_and_the_rate_after_it_are_timed(speaker):
    speaker.pieces, speaker.wait_s, speaker.ending = ("a",) * 5, 0.05, (*speaker.ending[:1], "data: [DONE]")
    answer = last(speaker)
    assert answer.ttft_s is not None and answer.tokens_per_s is not None
    assert answer.elapsed_s - answer.ttft_s > 0.19  # four more, each after 0.05 s at the least
    assert answer.tokens_per_s < 21


def test_an_answer_that_is_cut_at_the_limit_says_so():
    assert describe_speed(StreamedAnswer(text="a", tokens=1, ttft_s=0.1, elapsed_s=0.1, ended="length")).endswith(
        "1 token in 0.1 s · stopped at the limit of tokens"
    )


NO_EVENTS = ("[1]", '{"choices": [null]}', '{"choices": [{"delta": "a"}]}', '{"choices": [{"delta": {"content": 5}}]}')


@each(
    ("broken", "message"),
    [
        ({"status": 404}, "demo-tuned at .* answered 404"),
        ({"ending": ()}, "broke off after 2 tokens, without an end"),
        ({"ending": ('data: {"error": {"message": "out of memory"}}',)}, "broke off: .*out of memory"),
        ({"ending": ("data: {half",)}, "broke off: {half"),
        *(({"ending": (f"data: {event}",)}, rf"broke off: {re.escape(event)}$") for event in NO_EVENTS),
        ({"ending": ('data: {"usage": "many"}',)}, "broke off: .*many"),
        ({"ending": ("data: " + "a" * 2**21,)}, "broke off: aaa"),
        ({"ending": ("a" * 2**21,)}, "broke off: "),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(speaker, broken, message):
    speaker.status = 200
    for name, value in broken.items():
        setattr(speaker, name, value)
    with pytest.raises(EngineError, match=message):
        last(speaker)


def test_an_answer_has_every_character_and_ends_with_its_end_whatever_else_is_told(speaker):
    speaker.pieces = ()
    told = {"choices": [{"delta": {"content": "a\u2028b\x85"}, "finish_reason": "stop"}], "error": None}
    event = json.dumps(told, ensure_ascii=False)
    usages = [json.dumps({"choices": [], "usage": {"completion_tokens": count}}) for count in (-7, 10**30, True)]
    speaker.ending = (*(f"data: {each}" for each in (event, *usages, "[DONE]")), "data: after its end")
    answer = last(speaker)
    assert (answer.text, answer.ended, answer.tokens) == ("a\u2028b\x85", "stop", 1)


def test_a_server_that_is_not_there_is_an_error():
    with pytest.raises(EngineError, match=r"demo at http://127\.0\.0\.1:9: ConnectError.*is the server up\?"):
        list(stream_answer(ChatModel(label="x", url="http://127.0.0.1:9", model="demo"), ASKED, SamplingParams()))


def test_closing_the_answer_ends_the_request(speaker):
    speaker.pieces, speaker.wait_s = ("a" * 10_000,) * 1000, 0.01
    answers = stream_answer(speaker.voice(), ASKED, SamplingParams())
    next(answers)
    answers.close()
    assert speaker.hung_up.wait(60)


@pytest.mark.parametrize("wanted", ["error", "drop", "text"])
def test_control_tokens_of_a_conversation_are_read_as_those_of_rows(wanted, speaker, exported_run):
    run = exported_run({"data": {"control_tokens": wanted}})
    voice = replace(speaker.voice(), prompt_of=settle_prompts(run))
    plain = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    list(stream_answer(voice, plain, SamplingParams()))
    assert speaker.asked[0]["messages"] == plain
    spelled = [plain[0], {"role": "user", "content": "a<|turn>"}]
    if wanted == "error":
        with pytest.raises(EngineError, match=r"<\|turn> is a control token; --set data.control_tokens=text"):
            list(stream_answer(voice, spelled, SamplingParams()))
        return
    list(stream_answer(voice, spelled, SamplingParams()))
    if wanted == "drop":
        assert speaker.asked[1]["messages"] == plain
        return
    rows = trained_prompt(run, spelled)
    assert speaker.asked[1]["prompt"] == rows and "messages" not in speaker.asked[1]
    image = [{"role": "user", "content": make_content("<eos>", ["data:image/png;base64,"])}]
    with pytest.raises(EngineError, match=r"images cannot spell a control token as text"):
        list(stream_answer(voice, image, SamplingParams()))


def trained_prompt(run, turns):
    """The ids of the prompt as training reads them."""
    folder = Path(run.recipe.checkpoint)
    messages = tuple(text_message(turn["role"], settle_text(turn["content"], "text")) for turn in turns)
    [ids] = check_prompts(open_renderer(folder), [(Document(messages=messages, origin="x"), len(turns))])
    return ids.tolist()
