"""Log-likelihoods of choices: which tokens count, and what a server may answer instead."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemsmith.errors import MachineError
from gemsmith.evals.likelihood import ask_likelihoods, read_logprob
from gemsmith.runs.run import Run
from gemsmith.serve.client.chat import Failure, Reply
from gemsmith.serve.server import Server, running_server
from gemsmith.serve.settings import ServeSettings, find_vllm
from gemsmith.tasks.messages import text_message
from support.hostile_server import Hostile

PROMPT = [2, 7, 7]
CHOICES = {"yes": [11], "no way": [12, 13]}
MESSAGES = (text_message("user", "Really?"),)


def completion(ids: list[int], **changed: Any) -> dict[str, Any]:
    listed = [None, *({str(token): {"logprob": -token / 8}} for token in ids[1:])]
    return {"choices": [{"finish_reason": "length", "prompt_logprobs": listed, **changed}]}


def answer(asked: dict[str, Any]) -> tuple[int, bytes]:
    if "messages" in asked:
        reply: dict[str, Any] = {"tokens": PROMPT}
    elif isinstance(asked["prompt"], str):
        reply = {"tokens": CHOICES[asked["prompt"]]}
    else:
        reply = completion(asked["prompt"])
    return 200, json.dumps(reply).encode()


def asked_of(server: Server) -> dict[int, Reply | Failure]:
    heard: dict[int, Reply | Failure] = {}
    ask_likelihoods(server, {4: (MESSAGES, tuple(CHOICES)), 9: (MESSAGES, ("yes",))}, heard.__setitem__, concurrency=3)
    return heard


def test_the_tokens_of_the_choice_alone_are_summed_after_the_chats_own_prompt(hostile: Hostile) -> None:
    hostile.deed = answer
    heard = asked_of(hostile.server())
    assert {number: json.loads(reply.text) for number, reply in heard.items() if isinstance(reply, Reply)} == {
        4: [
            {"choice": "yes", "logprob": -11 / 8, "tokens": 1},
            {"choice": "no way", "logprob": -25 / 8, "tokens": 2},
        ],
        9: [{"choice": "yes", "logprob": -11 / 8, "tokens": 1}],
    }
    assert {"model": "demo", "messages": [{"role": "user", "content": "Really?"}], "add_generation_prompt": True} in (
        hostile.asked
    )
    assert [asked["add_special_tokens"] for asked in hostile.asked if isinstance(asked.get("prompt"), str)] == [
        False
    ] * 2


def test_a_question_with_a_choice_that_failed_has_that_failure_and_the_others_go_on(hostile: Hostile) -> None:
    hostile.deed = lambda asked: (400, b"too long") if asked.get("prompt") == [*PROMPT, 12, 13] else answer(asked)
    heard = asked_of(hostile.server())
    assert heard[4] == Failure(reason="http 400", detail="too long") and isinstance(heard[9], Reply)


def test_a_prompt_that_cannot_be_tokenised_is_asked_no_further(hostile: Hostile) -> None:
    hostile.deed = lambda asked: (200, b'{"tokens": []}') if asked.get("prompt") == "no way" else answer(asked)
    heard = asked_of(hostile.server())
    assert heard[4] == Failure(reason="no tokens", detail="the server's /tokenize gave none")
    assert isinstance(heard[9], Reply)


@pytest.mark.parametrize(
    ("changed", "detail"),
    [
        ({"prompt_logprobs": None}, "the server gave none for the prompt's tokens"),
        ({"prompt_logprobs": [None, {"11": {"logprob": -1}}]}, "the server gave none for the prompt's tokens"),
        ({"prompt_logprobs": [None, {}, {}, {"12": {"logprob": -1}}]}, "none for the token 11"),
        ({"prompt_logprobs": [None, {}, {}, {"11": {"logprob": None}}]}, "none for the token 11"),
    ],
)
def test_log_probabilities_that_are_not_there_are_a_failure(changed: dict[str, Any], detail: str) -> None:
    ids = [*PROMPT, 11]
    assert read_logprob(completion(ids, **changed), ids, 1) == Failure(reason="no log-probabilities", detail=detail)


@pytest.fixture
def server(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Server]:
    try:
        find_vllm()
    except MachineError as error:
        pytest.skip(str(error))
    settings = ServeSettings(max_model_len=640, dtype="float32")
    with running_server(tiny_checkpoint("tiny-31b"), name="m", settings=settings, log=tmp_path / "log") as running:
        yield running


def logprob_of(model: Any, tokenizer: Any, user: str, choice: str) -> tuple[float, int]:
    """A choice's log-probability after the chat's prompt by transformers, and its tokens.

    Tokenized as one text, as training does: the border is where it was.
    """
    import torch

    prompt = f"<bos><|turn>user\n{user}<turn|>\n<|turn>model\n"
    before = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    ids = tokenizer.encode(prompt + choice, add_special_tokens=False).ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, before - 1 : -1].log_softmax(-1)
    return logits.gather(1, torch.tensor(ids[before:])[:, None]).sum().item(), len(ids) - before


def open_model(folder: Path) -> tuple[Any, Any]:
    import torch
    from tokenizers import Tokenizer
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.vllm
def test_vllms_log_likelihoods_are_those_of_transformers_after_the_chat_template(server: Server) -> None:
    choices = ("module a;", "yes", "assign y = a & b;", "été 42")
    heard: dict[int, Reply | Failure] = {}
    ask_likelihoods(server, {0: (MESSAGES, choices)}, heard.__setitem__, concurrency=2)
    assert isinstance(heard[0], Reply), heard
    model, tokenizer = open_model(server.folder)
    for found, choice in zip(json.loads(heard[0].text), choices, strict=True):
        expected, tokens = logprob_of(model, tokenizer, "Really?", choice)
        assert (found["choice"], found["tokens"]) == (choice, tokens)
        assert found["logprob"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.vllm
def test_a_run_of_multiple_choice_is_scored_by_what_transformers_finds_likeliest(
    exported_run: Callable[..., Run], gemsmith: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """The expected answer is the likeliest choice in two rows of three, and the least likely in the third."""
    try:
        find_vllm()
    except MachineError as error:
        pytest.skip(str(error))
    file = tmp_path / "held_out.jsonl"
    sections = {"data": {"eval": str(file)}, "eval": {"scorer": "multiple-choice"}, "serve": {"dtype": "float32"}}
    run = exported_run(sections)
    model, tokenizer = open_model(run.merged)
    rows = []
    for number in range(6):
        user, choices = f"Which gate {number}?", ["and", "a nor gate", "xor it", "assign y = a;"]
        likeliest = sorted(choices, key=lambda choice: logprob_of(model, tokenizer, user, choice)[0])[::-1]
        expected = likeliest[-1 if number % 3 == 2 else 0]
        turns = [{"role": "user", "content": user}, {"role": "assistant", "content": expected}]
        rows.append({"messages": turns, "choices": choices})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    code, out, err = gemsmith("eval", run.path, "--json")
    assert code == 0, err
    record = json.loads(out)
    assert (record["scorer"], record["base"]["n"], record["tuned"]["n"]) == ("multiple-choice", 6, 6)
    # The merged weights are the base's, so that both are asked for the same numbers.
    assert record["base"]["score"] == record["tuned"]["score"] == pytest.approx(4 / 6, abs=1e-4)
    found = [json.loads(line) for line in (run.logs / "eval_rows.jsonl").read_text().splitlines()]
    assert [row["tuned_right"] for row in found] == [True, True, False] * 2
