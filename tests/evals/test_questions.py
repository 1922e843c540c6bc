"""Which questions a run asks, and what is refused before a server starts."""

import importlib.util
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gemsmith.data.chat_template import find_template
from gemsmith.data.tokenize import Renderer, open_renderer, open_tokenizer, render_documents
from gemsmith.errors import DataError, RecipeError
from gemsmith.evals.generate import make_request
from gemsmith.evals.stage import evaluate
from gemsmith.evals.tasks import check_tasks, open_tasks, read_questions
from gemsmith.runs.run import Run
from gemsmith.serve.client.chat import Reply, read_chat
from gemsmith.serve.server import Server
from gemsmith.serve.stage import Servers
from gemsmith.tasks.messages import text_of

from .conftest import EVAL, held_out


def test_eval_limit_draws_rows_by_its_seed_in_their_order(exported_run: Callable[..., Run]) -> None:
    def drawn(limit: int, seed: int) -> list[int]:
        asked = replace(run, recipe=run.recipe.override({"eval.limit": limit, "eval.limit_seed": seed}))
        return [rows.index(text_of(question.messages[0])) for question in read_questions(asked)]

    run, rows = exported_run({"eval": EVAL}), list(held_out(4))
    found = [drawn(2, seed) for seed in (0, 1, 2, 3)]
    assert found == [sorted(each) for each in found] and drawn(2, 3) == found[3]
    assert {place for each in found for place in each} == {0, 1, 2, 3} and {*found[3]} < {*drawn(3, 3)}
    assert drawn(4, 1) == drawn(9, 1) == [0, 1, 2, 3]


def test_no_held_out_rows_is_the_users_error(exported_run: Callable[..., Run]) -> None:
    run = exported_run({"data": {"eval": None}})
    for refuses in (read_questions, check_tasks):
        with pytest.raises(RecipeError, match=r"^data\.eval: names no held-out rows, so there is nothing to score"):
            refuses(run)


def test_everything_before_the_last_answer_is_the_question(exported_run: Callable[..., Run], tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "1"), ("assistant", "a"), ("user", "2"), ("assistant", "b")]
    file = tmp_path / "held.jsonl"
    file.write_text(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n")
    (question,) = read_questions(exported_run({"data": {"eval": str(file)}}))
    assert question.expected == "b"
    assert [(message.role, text_of(message)) for message in question.messages] == turns[:-1]


def test_a_row_that_starts_with_its_answer_has_no_question(exported_run: Callable[..., Run], tmp_path: Path) -> None:
    file = tmp_path / "held.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}) + "\n")
    with pytest.raises(DataError):
        read_questions(exported_run({"data": {"eval": str(file)}}))


@pytest.mark.parametrize(
    ("prompt", "response", "place"), [("a<|think|>", "b", "prompt"), ("a", "b<|tool_response>", "response")]
)
def test_a_held_out_row_with_a_control_token_is_refused_before_a_server_starts(
    prompt: str, response: str, place: str, exported_run: Callable[..., Run], tmp_path: Path
) -> None:
    file = tmp_path / "held.jsonl"
    rows = [
        {"prompt": "a", "response": "b"},
        {"prompt": prompt, "response": response},
        {"prompt": "<eos>", "response": "not asked"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = exported_run({"data": {"eval": str(file)}, "eval": {"limit": 2, "limit_seed": 1}})

    def start(*_: object, **__: object) -> AbstractContextManager[Server]:
        raise AssertionError("started a server")

    with (
        Servers(run, start=start) as servers,
        pytest.raises(DataError, match=rf"held.jsonl line 2: {place} holds <\|t.*>, a control token"),
    ):
        evaluate(run, servers)
    file.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[0]) + "\n" + json.dumps(rows[2]) + "\n")
    assert len(read_questions(run)) == 2


def test_control_tokens_that_are_text_are_asked_by_the_ids_of_training(
    exported_run: Callable[..., Run], tmp_path: Path
) -> None:
    file = tmp_path / "held.jsonl"
    rows = [{"prompt": "a<|turn>", "response": "b<eos>"}, {"prompt": "a", "response": "b"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = cast(Server, SimpleNamespace(model="m"))
    tasks, _ = open_tasks(exported_run({"data": {"eval": str(file), "control_tokens": "text"}, "eval": EVAL}))
    assert [question.expected for question in tasks[0].questions] == ["b<eos>", "b"]
    first, second = (make_request(server, tasks[0], number) for number in (0, 1))
    assert (first.path, first.body["prompt"]) == ("/v1/completions", tasks[0].prompts[0].tolist())
    assert first.body["prompt"].count(105) == 2 and "messages" not in first.body  # <|turn>, both the template's
    assert second.body["messages"] == [{"role": "user", "content": "a"}] and "prompt" not in second.body
    with pytest.raises(
        DataError, match=r"line 1: has a control token that is to be read as text, .*set data.control_to"
    ):
        make_request(server, replace(tasks[0], prompts=()), 0)
    assert read_chat({"choices": [{"text": "b", "finish_reason": "stop"}]}) == Reply(text="b", cut=False)


ASK = {"role": "user", "content": "rain in Ulm?"}
CALL = {"type": "function", "id": "a", "function": {"name": "weather", "arguments": {"city": "Ulm", "days": 2}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "look it up"}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "wet"}
TOOLS = [{"name": "weather", "description": "Of a day.", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture
def with_tools(exported_run: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """Returns a run whose held-out rows have these messages, and tools, with Google's template."""
    trl = importlib.util.find_spec("trl")
    if not trl or not trl.origin:
        pytest.skip("trl is not installed, which has the template")
    file, template = tmp_path / "held.jsonl", Path(trl.origin).parent / "chat_templates" / "gemma4_v5.jinja"

    def make(*rows: list[dict[str, object]], **data: object) -> Run:
        file.write_text("".join(json.dumps({"messages": row, "tools": TOOLS}) + "\n" for row in rows))
        return exported_run({"data": {"eval": str(file), "template": str(template), **data}, "eval": {"max_tokens": 9}})

    return make


def renderer_of(run: Run) -> Renderer:
    folder = Path(run.recipe.checkpoint)
    return open_renderer(folder, find_template(folder, run.recipe.data))


def test_rows_with_tools_are_asked_by_the_ids_of_training_and_answered_by_calls(with_tools: Callable[..., Run]) -> None:
    run = with_tools([ASK, CALLS], [ASK, CALLS, RESULT, {"role": "assistant", "content": "yes"}])
    ((task,), dataset) = open_tasks(run)
    tokenizer = open_tokenizer(Path(run.recipe.checkpoint))
    called, told = (re.sub(r"<\|.\|>", "", question.expected) for question in task.questions)
    assert "call:weather{city:Ulm,days:2}" in called and "look it up" not in called and told == "yes"
    server = cast(Server, SimpleNamespace(model="m"))
    for number, (document, end) in enumerate(zip(dataset.documents, ("model\n", "<tool_response|>"), strict=True)):
        request, (rendered,) = make_request(server, task, number), render_documents(renderer_of(run), [document])
        asked = request.body["prompt"]
        assert request.path == "/v1/completions" and asked == rendered.ids[: len(asked)].tolist()
        assert rendered.trained[len(asked)] and not rendered.trained[len(asked) - 1]
        text = tokenizer.decode(asked, skip_special_tokens=False)
        assert "declaration:weather{" in text and text.endswith(end)


def test_with_images_reasoning_or_elsewhere_rows_with_tools_are_refused(with_tools: Callable[..., Run]) -> None:
    said = r"line 1: has tools, which only eval asks, and only of its own servers, without images or data\.thinking; "
    run = with_tools([ASK, CALLS])
    for refuses in (
        read_questions,
        partial(open_tasks, elsewhere=("base", "tuned")),
        partial(open_tasks, elsewhere=("base",)),
    ):
        with pytest.raises(DataError, match=said):
            refuses(run)
    thinking = replace(run, recipe=run.recipe.override({"data.thinking": True}))
    for refuses in (open_tasks, check_tasks):
        with pytest.raises(DataError, match=said):
            refuses(thinking)
    image = {"role": "user", "content": [{"type": "image", "path": "a.png"}]}
    held = Path(run.recipe.data.eval)
    held.write_text(json.dumps({"messages": [image, CALLS]}) + "\n")
    with pytest.raises(DataError, match=said):
        check_tasks(run)
