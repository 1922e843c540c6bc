import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gemsmith.data.rows import read_documents
from gemsmith.errors import DataError, EngineError, RecipeError
from gemsmith.evals.stage import choose_examples, evaluate, read_questions
from gemsmith.recipe import Made
from gemsmith.run import Run, read_record
from gemsmith.serve.stage import Servers

EVAL = {"scorer": "verilog-exact", "max_tokens": 64, "concurrency": 3}


def held_out(rows: int) -> dict[str, str]:
    """Prompt -> answer of the rows that exported_run holds out."""
    documents = read_documents(Made(task="verilog", rows=rows, split="held-out"), seed=0)
    return {document.messages[0]["content"]: document.messages[-1]["content"] for document in documents}


def test_base_and_tuned_are_scored_on_the_same_rows(fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]) -> None:
    known = dict(list(held_out(4).items())[:3])
    fake_vllm(answers=known)
    run = exported_run({"eval": EVAL})
    with Servers(run) as servers:
        record = evaluate(run, servers)
    assert record == read_record(run, "eval")
    assert (record.tuned.score, record.tuned.n, record.tuned.cut) == (0.75, 4, 1)
    assert (record.base.score, record.base.n, record.base.cut) == (0.0, 4, 0)
    rows = [json.loads(line) for line in (run.logs / "eval_rows.jsonl").read_text().splitlines()]
    assert [row["tuned_right"] for row in rows] == [True, True, True, False]
    assert [row["tuned_cut"] for row in rows] == [False, False, False, True]
    assert [row["prompt"] for row in rows] == list(held_out(4))
    assert rows[0]["base"] == "module nothing;endmodule" and rows[0]["tuned"] == rows[0]["expected"]


def test_eval_limit_takes_the_first_rows(exported_run: Callable[..., Run]) -> None:
    questions = read_questions(exported_run({"eval": EVAL | {"limit": 2}}))
    assert [question.messages[0]["content"] for question in questions] == list(held_out(4))[:2]


def test_no_held_out_rows_is_the_users_error(exported_run: Callable[..., Run]) -> None:
    with pytest.raises(RecipeError, match=r"^data\.eval: "):
        read_questions(exported_run({"data": {"eval": None}}))


def test_everything_before_the_last_answer_is_the_question(exported_run: Callable[..., Run], tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "1"), ("assistant", "a"), ("user", "2"), ("assistant", "b")]
    file = tmp_path / "held.jsonl"
    file.write_text(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n")
    (question,) = read_questions(exported_run({"data": {"eval": str(file)}}))
    assert question.expected == "b"
    assert [(message["role"], message["content"]) for message in question.messages] == turns[:-1]


def test_a_refused_request_is_an_error_that_names_the_row(fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]) -> None:
    fake_vllm(status=400)
    run = exported_run({"eval": EVAL})
    with Servers(run) as servers, pytest.raises(EngineError, match=r"eval: row \d: vLLM answered 400: .*the fake refuses"):
        evaluate(run, servers)
    assert not run.record_file("eval").exists()


def test_examples_show_some_that_are_wrong_and_some_that_are_right() -> None:
    rows = [{"row": number, "tuned_right": number < 8} for number in range(1, 11)]
    assert [row["row"] for row in choose_examples(rows)] == [1, 2, 3, 8, 9]
    assert [row["row"] for row in choose_examples(rows[:6])] == [1, 2, 3, 4, 5]
    assert [row["row"] for row in choose_examples(rows[7:])] == [8, 9, 10]


def test_a_row_that_starts_with_its_answer_has_no_question(exported_run: Callable[..., Run], tmp_path: Path) -> None:
    file = tmp_path / "held.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}) + "\n")
    with pytest.raises(DataError):
        read_questions(exported_run({"data": {"eval": str(file)}}))
