"""Answers that exist already, scored without a server: `gemsmith eval --task verilog --answers FILE`."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

from gemsmith.errors import DataError, InputError, suggest
from gemsmith.evals.metrics import pass_at_each
from gemsmith.runs.eval_records import AnswersRecord, ProblemScore
from gemsmith.system.console import open_console, track
from gemsmith.system.files import regular_file
from gemsmith.system.json import parse_json
from gemsmith.system.sandbox import Sandbox, find_sandbox
from gemsmith.tasks.verilog.simulate import (
    Problem,
    Verdict,
    count_reasons,
    find_simulator,
    judge,
    open_bench,
    problems_sha256,
    read_problems,
)

_KEYS = {"problem", "completion"}


def score_answers(dataset: Path, file: Path, *, unsafe: bool = False) -> AnswersRecord:
    """The record of every answer in a JSONL file of {"problem", "completion"}, each run in a sandbox.

    Raises DataError for a dataset or an answer that cannot be read, MachineError without simulator or sandbox.
    """
    simulator, sandbox = find_simulator(), find_sandbox(unsafe=unsafe)
    problems = read_problems(dataset)
    answers = _read_answers(file, [problem.name for problem in problems])
    asked = [problem for problem in problems if problem.name in answers]
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        scored = [pool.submit(_score_problem, problem, answers[problem.name], sandbox) for problem in asked]
        scores = tuple(each.result() for each in track(scored, "scoring", open_console()))
    finally:  # also after Ctrl-C: what has not begun need not be waited for
        pool.shutdown(wait=False, cancel_futures=True)
    return AnswersRecord(
        task="verilog",
        dataset=str(dataset),
        dataset_sha256=problems_sha256(problems),
        answers=str(file),
        answers_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        simulator=simulator,
        sandbox=sandbox.bubblewrap is not None,
        problems=scores,
        left_out=sum(score.ungraded is not None for score in scores),
        unanswered=len(problems) - len(asked),
        pass_at=pass_at_each([score for score in scores if score.ungraded is None]),
    )


def score_named(given: Mapping[str, Any]) -> AnswersRecord:
    """The record of `gemsmith eval` without a run, from its options. Raises InputError for one too few or many."""
    if missing := [f"--{name}" for name in ("task", "dataset", "answers") if name not in given]:
        raise InputError(
            f"{missing[0]} is missing; give SOURCE, or --task verilog, --dataset FOLDER and --answers FILE"
        )
    if others := given.keys() - {"task", "dataset", "answers", "unsafe"}:
        raise InputError(
            f"--{min(others).replace('_', '-')}: is for answers that are still to come; give SOURCE, or leave it out"
        )
    return score_answers(given["dataset"], given["answers"], unsafe="unsafe" in given)


def print_answers(record: AnswersRecord) -> None:
    """Prints a table of the problems, and below it pass@k with intervals over problems."""
    console = open_console()
    table = Table("problem", "passed", "not passed, by reason", box=None, header_style="bold")
    for score in record.problems:
        why = ", ".join(f"{count} {reason}" for reason, count in score.reasons.items())
        table.add_row(score.name, f"{score.passed} of {score.samples}", score.ungraded or why)
    console.print(table)
    scored = len(record.problems) - record.left_out
    for each in record.pass_at:
        interval = f"[{100 * each.low:.1f}%, {100 * each.high:.1f}%]"
        console.print(f"pass@{each.k} {100 * each.score:.1f}% {interval} over {scored} problems")
    if record.left_out:
        console.print(f"{record.left_out} problems do not count: {record.simulator} cannot run their own reference")
    if record.unanswered:
        console.print(
            f"{record.unanswered} problems of the dataset have no answer in {record.answers} and do not count"
        )
    if not record.sandbox:
        console.print("generated code ran without a sandbox")


def _score_problem(problem: Problem, answers: Sequence[str], sandbox: Sandbox) -> ProblemScore:
    bench = open_bench(problem, sandbox)
    if isinstance(bench, Verdict):
        why = f"its own reference does not pass: {bench.reason}, {bench.detail}"
        return ProblemScore(name=problem.name, samples=len(answers), passed=0, reasons={}, ungraded=why)
    verdicts = [judge(bench, answer, sandbox) for answer in answers]
    return ProblemScore(
        name=problem.name,
        samples=len(answers),
        passed=sum(verdict.passed for verdict in verdicts),
        reasons=dict(count_reasons(verdicts)),
        details=tuple(dict.fromkeys(f"{each.reason}: {each.detail}" for each in verdicts if each.reason)),
    )


def _read_answers(file: Path, names: Sequence[str]) -> Mapping[str, list[str]]:
    """The answers to each problem, in the file's order."""
    try:
        lines = regular_file(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"--answers {file}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise DataError(f"--answers {file}: is not UTF-8 text") from None
    answers: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            problem, completion = _read_answer(line, f"--answers {file}:{number}")
            if problem not in names:
                raise DataError(
                    f"--answers {file}:{number}: {problem!r} is no problem of the dataset{suggest(problem, names)}; "
                    "problems are named by their files, without _prompt.txt"
                )
            answers.setdefault(problem, []).append(completion)
    if not answers:
        raise DataError(f'--answers {file}: holds no answer; give one a line: {{"problem": "…", "completion": "…"}}')
    return answers


def _read_answer(line: str, place: str) -> tuple[str, str]:
    form = '{"problem": "…", "completion": "…"}'
    try:
        row = parse_json(line)
    except ValueError:
        raise DataError(f"{place}: is not JSON; each line must be {form}") from None
    if not isinstance(row, dict) or not row.keys() >= _KEYS or not all(isinstance(row[key], str) for key in _KEYS):
        raise DataError(f"{place}: must be {form}, both texts")
    return row["problem"], row["completion"]
