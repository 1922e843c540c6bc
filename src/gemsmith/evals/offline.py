"""Answers that exist already, scored without a server: `gemsmith eval --task verilog --answers FILE`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gemsmith.data.reader import jsonl_rows
from gemsmith.errors import DataError, InputError, suggest
from gemsmith.evals.generate import grade, judging
from gemsmith.evals.metrics import pass_at_each
from gemsmith.evals.results import problem_score
from gemsmith.runs.eval_records import AnswersRecord, ProblemScore
from gemsmith.serve.client.chat import Reply
from gemsmith.system.console import open_console, track
from gemsmith.system.files import sha256_file
from gemsmith.system.format import counts
from gemsmith.tasks.verilog.task import PROMPTS, open_judges, read_questions


def score_named(given: Mapping[str, Any]) -> AnswersRecord:
    """The record of every answer in a JSONL file of {"problem", "completion"}, each run in a sandbox.

    `given` are the options of `gemsmith eval` without a run. Raises InputError for one too few or many, DataError for a
    dataset or an answer that cannot be read, MachineError without simulator or sandbox.
    """
    if missing := [f"--{name}" for name in ("task", "dataset", "answers") if name not in given]:
        remedy = "give SOURCE, or --task verilog, --dataset FOLDER and --answers FILE"
        raise InputError(f"{missing[0]} is missing; {remedy}")
    if others := given.keys() - {"task", "dataset", "answers", "unsafe"}:
        option = f"--{min(others).replace('_', '-')}"
        raise InputError(f"{option}: is for answers that are still to come; give SOURCE, or leave it out")
    dataset, file = Path(given["dataset"]), Path(given["answers"])
    found = read_questions(dataset, prompt=PROMPTS[0])
    answers = _read_answers(file, [question.origin for question in found.questions])
    asked = [question for question in found.questions if question.origin in answers]
    judges = open_judges(asked, unsafe="unsafe" in given)
    with judging(judges) as submit:
        waiting = [
            (question, [(text, submit(question, text)) for text in answers[question.origin]])
            for question in asked
            if question.origin not in judges.ungraded
        ]
        scored = {}
        for question, judged in track(waiting, "scoring", open_console()):
            graded = [grade(Reply(text=text, cut=False), each.result()) for text, each in judged]
            scored[question.origin] = problem_score(question, graded)
    ungraded = {
        name: ProblemScore(name=name, samples=len(answers[name]), passed=0, reasons={}, ungraded=why)
        for name, why in judges.ungraded.items()
    }
    return AnswersRecord(
        task="verilog",
        dataset=str(dataset),
        dataset_sha256=found.sha256,
        answers=str(file),
        answers_sha256=sha256_file(file),
        simulator=judges.tool,
        sandbox=judges.sandboxed,
        problems=tuple((scored | ungraded)[question.origin] for question in asked),
        left_out=len(judges.ungraded),
        unanswered=len(found.questions) - len(asked),
        pass_at=pass_at_each(list(scored.values())),
    )


def print_answers(record: AnswersRecord) -> None:
    console = open_console()
    table = Table("problem", "passed", "not passed, by reason", box=None, header_style="bold")
    for score in record.problems:
        why = score.ungraded or counts(score.reasons)
        table.add_row(score.name, f"{score.passed} of {score.samples}", why)
    console.print(table)
    scored = len(record.problems) - record.left_out
    for each in record.pass_at:
        interval = f"[{100 * each.low:.1f}%, {100 * each.high:.1f}%]"
        console.print(f"pass@{each.k} {100 * each.score:.1f}% {interval} over {scored} problems")
    if record.left_out:
        console.print(f"{record.left_out} problems do not count: {record.simulator} cannot run their own reference")
    if record.unanswered:
        left = f"{record.unanswered} problems of the dataset"
        console.print(f"{left} have no answer in {record.answers} and do not count")
    if not record.sandbox:
        console.print("generated code ran without a sandbox")


def _read_answers(file: Path, names: Sequence[str]) -> Mapping[str, list[str]]:
    """The answers to each problem, in the file's order."""
    form = '{"problem": "…", "completion": "…"}'
    answers: dict[str, list[str]] = {}
    try:
        for place, row in jsonl_rows(file):
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("problem", "completion")):
                raise DataError(f"--answers {place}: must be {form}, both texts")
            problem = row["problem"]
            if problem not in names:
                why = f"{problem!r} is no problem of the dataset{suggest(problem, names)}"
                raise DataError(f"--answers {place}: {why}; problems are named by their files, without _prompt.txt")
            answers.setdefault(problem, []).append(row["completion"])
    except OSError as error:
        raise DataError(f"--answers {file}: cannot be read ({error.strerror or error})") from None
    if not answers:
        raise DataError(f"--answers {file}: holds no answer; give one a line: {form}")
    return answers
