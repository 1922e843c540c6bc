"""Rows are answered in their order, once each, whatever happens to the command or the server meanwhile."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gemsmith.cli import cli
from gemsmith.errors import DataError, EngineError, InputError, RunError
from gemsmith.evals.predict import predict_run, predict_url
from gemsmith.recipe.load import dump_recipe
from gemsmith.recipe.schema import ResolvedValue
from gemsmith.runs.run import Run
from gemsmith.serve.client import batch
from gemsmith.serve.client.stream import SamplingParams
from support.fault_points import state, wait_until
from support.hostile_server import Hostile, chat
from support.images import image_bytes

from .conftest import EVAL, held_out

GREEDY = SamplingParams(max_tokens=8)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "WAITS_S", (0.01, 0.01))


def echo(asked: dict[str, Any]) -> tuple[int, bytes]:
    return chat(f"<{asked['messages'][-1]['content']}>", usage={"completion_tokens": 3})


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def answers(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def asked_texts(hostile: Hostile) -> list[str]:
    return [asked["messages"][-1]["content"] for asked in hostile.asked]


def test_rows_of_every_form_are_asked_without_their_answers(hostile: Hostile, tmp_path: Path) -> None:
    hostile.deed = echo
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    messages = [turns, [*turns, {"role": "assistant", "content": "d"}], turns[:1]]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": each} for each in messages])
    record = predict_url(hostile.url, rows, tmp_path / "out.jsonl", sampling=GREEDY, concurrency=1)
    assert [row["answer"] for row in answers(tmp_path / "out.jsonl")] == ["<c>", "<c>", "<a>"]
    assert [len(asked["messages"]) for asked in hostile.asked] == [3, 1]  # equal rows once
    assert (record.rows, record.asked, record.asked_tokens, record.failed) == (3, 2, 6, {})
    plain = write_rows(tmp_path / "plain.jsonl", [{"prompt": "p"}, {"prompt": "q", "response": "r"}])
    predict_url(hostile.url, plain, tmp_path / "plain.out", sampling=GREEDY)
    assert [row["answer"] for row in answers(tmp_path / "plain.out")] == ["<p>", "<q>"]


def test_a_run_answers_by_its_model_and_starts_no_server_without_need(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], tmp_path: Path
) -> None:
    known = held_out(3)
    fake_vllm(answers=known)
    run = exported_run({"eval": EVAL})
    rows, out = write_rows(tmp_path / "r.jsonl", [{"prompt": prompt} for prompt in known]), tmp_path / "o.jsonl"
    predict_run(run, rows, out, sampling=SamplingParams(max_tokens=64))
    assert [row["answer"] for row in answers(out)] == list(known.values())
    predict_run(run, rows, tmp_path / "base.jsonl", model="base", sampling=GREEDY)
    assert [row["answer"] for row in answers(tmp_path / "base.jsonl")] == ["module nothing;endmodule"] * 3
    forged = write_rows(tmp_path / "f.jsonl", [{"prompt": "a<turn|>"}])
    with pytest.raises(DataError, match="line 1: "):
        predict_run(run, forged, tmp_path / "f.out", sampling=GREEDY)
    run.record_file("verify").unlink()
    with pytest.raises(RunError, match="weights not served"):
        predict_run(run, rows, tmp_path / "g.out", sampling=GREEDY)


def test_images_need_a_server_that_takes_them(
    exported_run: Callable[..., Run], seeing_checkpoint: Path, tmp_path: Path
) -> None:
    run = exported_run(checkpoint=seeing_checkpoint)
    (tmp_path / "a.png").write_bytes(image_bytes(64, 64))
    rows = write_rows(tmp_path / "i.jsonl", [{"prompt": "a", "image": "a.png"}])
    with pytest.raises(DataError, match=r"line 1: has an image, .*--set serve.images=true"):
        predict_run(run, rows, tmp_path / "i.out", sampling=GREEDY)


def test_the_server_has_room_for_the_longest_prompt_and_answer(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], tmp_path: Path
) -> None:
    """As short as eval needs, it refuses a default answer of 512 tokens; a length of the user's stays, and is said."""
    fake_vllm(answers={"hi": "Hello"})
    run = exported_run({"serve": {"max_model_len": 352}})
    rows, sampling = write_rows(tmp_path / "r.jsonl", [{"prompt": "hi"}]), SamplingParams()
    with pytest.raises(DataError, match=r"line 1: its prompt has \d+ tokens, with --max-tokens 512 more than the 352 "):
        predict_run(run, rows, tmp_path / "a.jsonl", sampling=sampling)
    run.recipe_file.write_text(dump_recipe(run.recipe, [ResolvedValue("serve.max_model_len", 352, "eval's")]))
    predict_run(run, rows, tmp_path / "a.jsonl", sampling=sampling)
    assert [row["answer"] for row in answers(tmp_path / "a.jsonl")] == ["Hello"]
    with pytest.raises(DataError, match="more than the 2048 that the server holds"):
        predict_run(run, rows, tmp_path / "b.jsonl", sampling=SamplingParams(max_tokens=4000))


def test_a_key_that_ends_meanwhile_is_told_at_once_and_answers_are_kept(hostile: Hostile, tmp_path: Path) -> None:
    rows, out = (
        write_rows(tmp_path / "r.jsonl", [{"prompt": str(number)} for number in range(50)]),
        tmp_path / "o.jsonl",
    )
    hostile.deed = lambda asked: echo(asked) if len(hostile.asked) <= 30 else (401, b"expired")
    with pytest.raises(
        InputError, match=r"refuses a request with http 401 \(expired\); earlier answers are kept: set "
    ):
        predict_url(hostile.url, rows, out, sampling=GREEDY)
    assert len(hostile.asked) < 50
    hostile.deed = echo
    hostile.asked.clear()
    assert predict_url(hostile.url, rows, out, sampling=GREEDY).failed == {}
    assert 20 <= len(hostile.asked) < 50


def test_failed_rows_are_counted_and_asked_for_again(
    hostile: Hostile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = write_rows(tmp_path / "r.jsonl", [{"prompt": str(number)} for number in range(5)]), tmp_path / "o.jsonl"
    hostile.deed = lambda asked: (400, b"too long") if asked["messages"][0]["content"] == "3" else echo(asked)
    record = predict_url(hostile.url, rows, out, sampling=GREEDY)
    assert record.failed == {"http 400": 1}
    assert answers(out)[3] == {"row": "r.jsonl line 4", "answer": None, "error": "http 400: too long"}
    hostile.deed = echo
    hostile.asked.clear()
    assert "earlier start" not in capsys.readouterr().err
    record = predict_url(hostile.url, rows, out, sampling=GREEDY)
    assert asked_texts(hostile) == ["3"]
    assert "predict: 4 of 5 answers are there from an earlier start" in capsys.readouterr().err
    assert [row["answer"] for row in answers(out)] == [f"<{number}>" for number in range(5)]
    assert not (tmp_path / "o.jsonl.partial").exists()
    with pytest.raises(InputError, match="is there already; --force"):
        predict_url(hostile.url, rows, out, sampling=GREEDY)
    predict_url(hostile.url, rows, out, sampling=GREEDY, force=True)
    assert len(hostile.asked) == 6


def test_where_no_row_is_answered_it_fails_and_writes_nothing(hostile: Hostile, tmp_path: Path) -> None:
    rows, out = write_rows(tmp_path / "r.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "o.jsonl"
    hostile.deed = lambda _asked: (400, b"max_tokens is too large")
    with pytest.raises(EngineError, match=r"answered none of 2 rows \(2 http 400\); the first: .*is too large"):
        predict_url(hostile.url, rows, out, sampling=GREEDY)
    assert not out.exists()


def test_columns_that_are_not_read_are_said(
    hostile: Hostile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [{"prompt": "a", "id": 7}])
    hostile.deed = echo
    record = predict_url(hostile.url, rows, tmp_path / "o.jsonl", sampling=GREEDY)
    assert record.warnings == ("ignored the columns id (1 row)",)
    assert "ignored the columns id (1 row)" in capsys.readouterr().err


def test_answers_of_other_settings_are_not_taken(hostile: Hostile, tmp_path: Path) -> None:
    rows, out = write_rows(tmp_path / "r.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "o.jsonl"
    hostile.deed = lambda asked: (400, b"no") if asked["messages"][0]["content"] == "b" else echo(asked)
    predict_url(hostile.url, rows, out, sampling=GREEDY)
    hostile.asked.clear()
    predict_url(hostile.url, rows, out, sampling=SamplingParams(max_tokens=9))
    assert sorted(asked_texts(hostile)) == ["a", "b"]


def test_a_server_that_goes_away_ends_it_and_loses_nothing(hostile: Hostile, tmp_path: Path) -> None:
    rows, out = write_rows(tmp_path / "r.jsonl", [{"prompt": str(number)} for number in range(9)]), tmp_path / "o.jsonl"

    def deed(asked: dict[str, Any]) -> Any:
        if len(hostile.asked) < 5:
            return echo(asked)
        hostile.vanish()
        return "cut"

    hostile.deed = deed
    with pytest.raises(EngineError, match=r"does not answer any more .* the same command asks for the others"):
        predict_url(hostile.url, rows, out, sampling=GREEDY, concurrency=1)
    assert not out.exists()
    assert len((tmp_path / "o.jsonl.partial" / "answers.jsonl").read_text().splitlines()) >= 4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["r.jsonl"], "r.jsonl: give RUN and ROWS"),
        (["run", "r.jsonl", "--url", "http://x"], "run r.jsonl: give ROWS alone with --url"),
        (["run", "r.jsonl", "--model", "both"], "--model: both was given; allowed for a run: base, tuned"),
        (["r.jsonl", "--url", "http://x", "--set", "serve.port=1"], "--set: does not go with --url"),
        (["r.jsonl", "--url", "http://x"], "r.jsonl: does not exist"),
    ],
)
def test_a_command_that_cannot_be_meant_is_one_line(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(cli, ["predict", *arguments, "--out", "o.jsonl"])
    assert isinstance(done.exception, InputError | DataError)
    assert told in str(done.exception)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"text": "a"}, "r.jsonl line 1: is raw text, which asks nothing"),
        ({"prompt": " "}, "prompt is an empty prompt"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "begins with an assistant turn"),
        ({"prompt": "a", "image": "gone.png"}, "gone.png"),
    ],
)
def test_a_row_that_cannot_be_asked_is_named_before_any_request(
    hostile: Hostile, tmp_path: Path, row: dict[str, Any], told: str
) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [row])
    with pytest.raises(DataError, match=told):
        predict_url(hostile.url, rows, tmp_path / "o.jsonl", sampling=GREEDY)
    assert not hostile.asked


@pytest.mark.slow
def test_killed_at_random_it_writes_the_same_file(hostile: Hostile, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [{"prompt": f"row {number}"} for number in range(200)])
    hostile.deed = echo
    predict_url(hostile.url, rows, tmp_path / "whole.jsonl", sampling=GREEDY)

    out, partial = tmp_path / "killed.jsonl", tmp_path / "killed.jsonl.partial" / "answers.jsonl"
    kills = goal = 0

    def answered() -> int:
        return len(partial.read_bytes().splitlines()) if partial.exists() else 0

    def until_it_is_killed(asked: dict[str, Any]) -> tuple[int, bytes]:
        while kills < 10 and answered() >= goal:
            time.sleep(0.01)
        return echo(asked)

    hostile.deed = until_it_is_killed
    hostile.asked.clear()
    command = [sys.executable, "-m", "gemsmith", "predict", str(rows), "--url", hostile.url, "--out", str(out)]
    command += ["--max-tokens", "8", "--concurrency", "2"]
    while not out.exists():
        goal = random.randint(3, 15) + answered()
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        while process.poll() is None:
            if kills < 10 and answered() >= goal:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
            time.sleep(0.01)
        _, said = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), said
    assert kills == 10
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(hostile.asked) < 200 + 2 * 3 * kills


def test_suspended_and_continued_it_writes_the_same_file_and_asks_nothing_twice(
    hostile: Hostile, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [{"prompt": f"row {number}"} for number in range(40)])
    hostile.deed = echo
    predict_url(hostile.url, rows, tmp_path / "whole.jsonl", sampling=GREEDY)
    out, partial = tmp_path / "suspended.jsonl", tmp_path / "suspended.jsonl.partial" / "answers.jsonl"
    was_suspended = threading.Event()

    def answered() -> int:
        return len(partial.read_bytes().splitlines()) if partial.exists() else 0

    def until_it_is_suspended(asked: dict[str, Any]) -> tuple[int, bytes]:
        while answered() >= 5 and not was_suspended.wait(0.01):
            pass
        return echo(asked)

    hostile.deed = until_it_is_suspended
    hostile.asked.clear()
    command = [sys.executable, "-m", "gemsmith", "predict", str(rows), "--url", hostile.url, "--out", str(out)]
    process = subprocess.Popen([*command, "--max-tokens", "8", "--concurrency", "2"], stderr=subprocess.PIPE)
    wait_until(lambda: answered() >= 5, process.pid)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state(process.pid) == "T", process.pid)
    was_suspended.set()
    assert not out.exists()
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(hostile.asked) == 40
