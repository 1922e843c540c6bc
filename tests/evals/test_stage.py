"""The record of an evaluation: scores, notices, and what they rest on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemsmith.data.dataset import read_dataset
from gemsmith.data.dedup import hash_turns, write_answers
from gemsmith.evals.stage import evaluate
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.run import Run, read_record
from gemsmith.serve.stage import Servers

from .conftest import EVAL, held_out


def test_base_and_tuned_are_scored_on_the_same_rows(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    known = dict(list(held_out(4).items())[:3])
    fake_vllm(answers=known)
    run = exported_run({"eval": EVAL})
    with Servers(run) as servers:
        record = evaluate(run, servers)
    assert record == read_record(run, EvalRecord)
    assert (record.tuned.score, record.tuned.n, record.tuned.cut) == (0.75, 4, 1)
    assert (record.base.score, record.base.n, record.base.cut) == (0.0, 4, 0)
    found = record.tasks[0].difference
    assert (found.better, found.worse, found.p_value) == (3, 0, 0.25)
    assert record.warnings[0].startswith(
        "verilog-exact: This does not tell the tuned model from the base: 75.0 % against 0.0 %, +75.0 points (95 % "
    )
    rows = [json.loads(line) for line in (run.logs / "eval_rows.jsonl").read_text().splitlines()]
    assert [row["tuned_right"] for row in rows] == [True, True, True, False]
    assert [row["tuned_cut"] for row in rows] == [False, False, False, True]
    assert [row["prompt"] for row in rows] == list(held_out(4))
    assert rows[0]["base"] == "module nothing;endmodule" and rows[0]["tuned"] == rows[0]["expected"]


def test_a_score_that_rose_needs_no_notice(fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]) -> None:
    fake_vllm(answers=held_out(8))
    run = exported_run({"eval": EVAL, "data": {"eval": {"task": "verilog", "rows": 8, "split": "held-out"}}})
    run.data.mkdir()
    write_answers(run.data, map(hash_turns, read_dataset(run.recipe.data.train, seed=0).documents))
    with Servers(run) as servers:
        record = evaluate(run, servers)
    assert (record.tasks[0].difference.better, record.held_out_also_trained) == (8, 0)
    assert record.warnings == record.critical_warnings == ()


def test_a_score_that_fell_is_a_grave_notice(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm(answers=held_out(8))
    run = exported_run({"eval": EVAL, "data": {"eval": {"task": "verilog", "rows": 8, "split": "held-out"}}})
    with Servers(run) as servers:
        better, worse = servers.tuned, servers.base
        monkeypatch.setattr(servers, "base", better)
        monkeypatch.setattr(servers, "tuned", worse)
        record = evaluate(run, servers)
    assert record == read_record(run, EvalRecord)
    assert record.critical_warnings[0].startswith(
        "verilog-exact: The tuned model is worse than the base: 0.0 % against 100.0 %, -100.0 points"
    )


def test_scored_rows_that_are_trained_on_are_counted_whatever_the_data_stage_was_given(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(answers={})
    run = exported_run({"eval": EVAL | {"limit": 3, "limit_seed": 1}})
    run.data.mkdir()
    write_answers(run.data, map(hash_turns, read_dataset(run.recipe.data.eval, seed=0).documents[1:]))
    with Servers(run) as servers:
        record = evaluate(run, servers)
    assert record.held_out_also_trained == 2
    assert (record.tasks[0].drawn_from, record.tasks[0].limit_seed) == (4, 1)
    assert record.warnings[0] == "verilog-exact: eval.limit: 3 of 4 rows were scored, drawn by eval.limit_seed 1."
    assert (
        "2 of 3 (verilog held-out row 2, verilog held-out row 3), 2 of them with the same answer" in record.warnings[2]
    )
    [first, *_] = map(json.loads, (run.logs / "eval_rows.jsonl").read_text().splitlines())
    assert first["origin"] == "verilog held-out row 1"


def test_data_of_an_earlier_version_leaves_it_open_what_was_trained_on(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(answers={})
    run = exported_run({"eval": EVAL})
    with Servers(run) as servers:
        record = evaluate(run, servers)
    assert record.held_out_also_trained is None
    assert "whether held-out rows are also trained on is not known" in record.warnings[1]


def test_columns_of_held_out_rows_that_are_not_read_are_counted_and_said(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_vllm()
    file = tmp_path / "held.jsonl"
    file.write_text(
        json.dumps({"prompt": "a", "response": "b", "id": 1})
        + "\n"
        + json.dumps({"prompt": "a", "response": "b"})
        + "\n"
    )
    run = exported_run({"data": {"eval": str(file)}, "eval": EVAL})
    with Servers(run) as servers:
        assert evaluate(run, servers).ignored_columns == {"id": 1}
    assert "eval: ignored the columns id (1 row)" in capsys.readouterr().err


def test_an_evaluation_that_is_forced_asks_again_and_says_what_it_replaces(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], tmp_path: Path, gemsmith: Callable[..., Any]
) -> None:
    asked = tmp_path / "asked"
    fake_vllm(answers=held_out(4), asked=str(asked))
    run = exported_run({"eval": EVAL})
    assert gemsmith("eval", run.path)[0] == 0 and len(asked.read_text().splitlines()) == 8
    code, _, err = gemsmith("eval", run.path, "--set", "eval.limit=2", "--force")
    assert code == 0 and len(asked.read_text().splitlines()) == 8 + 4
    assert (
        "the record of 4 answers of each model is replaced by one of 2 once that is complete; eval.limit: null -> 2"
        in (" ".join(err.split()))
    )
    assert read_record(run, EvalRecord).tuned.n == 2


@pytest.mark.slow
def test_an_evaluation_that_is_forced_and_stopped_loses_nothing_and_goes_on(
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
    gemsmith: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gemsmith.evals.generate.MOST_RESTARTS", 1)
    fake_vllm(answers=held_out(4))
    run = exported_run({"eval": EVAL | {"concurrency": 1}})
    assert gemsmith("eval", run.path)[0] == 0
    files = [run.record_file("eval"), *run.logs.glob("eval_*.jsonl")]
    before = {file: file.read_bytes() for file in files}
    fake_vllm(answers=held_out(4), die_after=1)
    assert gemsmith("eval", run.path, "--force")[0] == 1
    assert {file: file.read_bytes() for file in files} == before
    fake_vllm(answers=held_out(4))
    code, _, err = gemsmith("eval", run.path, "--force")
    assert (
        code == 0
        and "is replaced" not in err
        and "eval: tuned: 2 of 4 answers are there from an earlier start" in err
        and err.count("from an earlier start") == 1
    )
    assert sorted(run.logs.glob("eval_*.jsonl")) == sorted(files[1:])


def test_no_server_is_started_where_all_answers_are_there(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(answers=held_out(4), version_json={"version": "0.32.0"})
    run = exported_run({"eval": EVAL})
    with Servers(run) as servers:
        record = evaluate(run, servers)
    run.record_file("eval").unlink()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("vLLM is started")

    with Servers(run, start=refuse) as servers:
        again = evaluate(run, servers)
    assert (again.base, again.tuned, again.server) == (record.base, record.tuned, record.server)
    assert again.server is not None and again.server.version == "0.32.0"
    assert again.provenance.versions == record.provenance.versions
