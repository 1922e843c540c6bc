"""The stage `eval`: answers of the tuned and the base model to the same questions, scored and compared."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from gemsmith.checkpoint import open_checkpoint
from gemsmith.data.documents import Document
from gemsmith.data.overlap import Overlap, find_overlap, overlap_notices, read_answers
from gemsmith.data.rows import Dataset
from gemsmith.errors import RecipeError
from gemsmith.eval_records import EvalRecord, TaskResult
from gemsmith.evals.compare import Comparison, compare, unmoved_notices, worse_notices
from gemsmith.evals.kept import digest_model
from gemsmith.evals.questions import OpenTask, open_tasks
from gemsmith.evals.results import (
    answer_notices,
    choose_examples,
    grave_notices,
    make_result,
    make_rows,
    picture_notices,
    source_notices,
)
from gemsmith.evals.sampling import ANSWERS, DONE, Answers, Model, answer_all
from gemsmith.evals.show import print_scores
from gemsmith.files import replacing, sha256_file
from gemsmith.messages import text_message
from gemsmith.provenance import Clock, start_clock
from gemsmith.records import ExportRecord
from gemsmith.run import Run, is_complete, read_record, write_record
from gemsmith.serve.stage import Servers, origin_with_engine


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A task with both models' answers and what the record says of them."""

    task: OpenTask
    base: Answers
    tuned: Answers
    result: TaskResult

    def compare_rows(self) -> Comparison:
        """Of the rows that both models have answered and a scorer has judged."""
        pairs = list(zip(self.base.all(), self.tuned.all(), strict=True))
        pairs = [pair for pair in pairs if not any(one.failed or one.unscored for one in pair)]
        return compare([one.right for one, _ in pairs], [other.right for _, other in pairs])


def evaluate(run: Run, servers: Servers) -> EvalRecord:
    """Scores tuned and base on the same questions and records both; each answer goes to logs/eval_rows.jsonl.

    Answers are kept in logs/eval_answers.jsonl as they come, and a second start asks for the others only. So does one
    with other tasks; an evaluation that is complete and done again asks for all.

    Raises RecipeError where there is nothing to score, DataError where a row has no answer to compare with, EngineError
    where a server dies again and again or too many requests fail, ScorerError where the scorer fails on as many.
    """
    clock = start_clock()
    tasks, dataset = open_tasks(run)
    _check_pictures(tasks, servers)
    overlap = _find_trained(run, tasks)
    read_record(run, ExportRecord)
    servers.check_verified()  # also where all answers are there from an earlier start
    if is_complete(run, "eval"):
        (run.logs / DONE).unlink(missing_ok=True)
    # Tuned first: its server is often still up from serve or bench, so that servers change once.
    tuned, base = (_answer_tasks(run, tasks, model) for model in _models(run, servers))
    scored = [
        Scored(task=task, base=one, tuned=other, result=make_result(task, one, other))
        for task, one, other in zip(tasks, base, tuned, strict=True)
    ]
    record = _make_record(run, servers, clock, scored, dataset, overlap)
    _write_rows(run, scored)
    write_record(run, record)
    _keep_answers(run)
    return record


def _check_pictures(tasks: Sequence[OpenTask], servers: Servers) -> None:
    seen = next((question for task in tasks for question in task.questions if question.pictures), None)
    if seen and not servers.takes_pictures:
        raise RecipeError(
            f"serve.pictures: is false, no trained row has a picture, and {seen.origin} of data.eval has one; set it "
            "to true"
        )


def _models(run: Run, servers: Servers) -> tuple[Model, Model]:
    """Tuned and base."""
    checkpoint = open_checkpoint(run.recipe.checkpoint)
    fingerprint, export = checkpoint.fingerprint(), sha256_file(run.record_file("export"))
    return (
        Model(
            role="tuned",
            digest=lambda tokens: digest_model(run, run.merged, export, max_tokens=tokens),
            start=servers.tuned,
            stop=servers.stop,
        ),
        Model(
            role="base",
            digest=lambda tokens: digest_model(run, checkpoint.folder, fingerprint, max_tokens=tokens),
            start=servers.base,
            stop=servers.stop,
        ),
    )


def _answer_tasks(run: Run, tasks: Sequence[OpenTask], model: Model) -> list[Answers]:
    found = []
    for task in tasks:
        answers = answer_all(run, task, model)
        print_scores(task, model.role, answers)
        found.append(answers)
    return found


def _make_record(
    run: Run,
    servers: Servers,
    clock: Clock,
    scored: Sequence[Scored],
    dataset: Dataset | None,
    overlap: Overlap | None,
) -> EvalRecord:
    first, rows = scored[0], [each for each in scored if each.task.held_out]
    comparison, server = first.compare_rows() if first.task.held_out else None, servers.base()
    return EvalRecord(
        origin=origin_with_engine(run, "eval", clock, server, sources=_sources(scored)),
        server=server.facts,
        notices=(
            *servers.notices,
            *(
                notice
                for each in scored
                for role, answers in (("base", each.base), ("tuned", each.tuned))
                for notice in answer_notices(each.task, role, answers)
            ),
            *(notice for each in rows[:1] for notice in picture_notices(each.task)),
            *(notice for each in rows for notice in unmoved_notices(each.compare_rows())),
            *(notice for each in scored if not each.task.held_out for notice in source_notices(each.task, each.result)),
            *(overlap_notices(overlap) if rows else ()),
        ),
        scorer=first.result.task,
        ignored_columns=dict(dataset.ignored_columns) if dataset else {},
        base=first.result.base.score,
        tuned=first.result.tuned.score,
        examples=choose_examples(list(make_rows(first.task, first.base, first.tuned))),
        rows_better=comparison.better if comparison else None,
        rows_worse=comparison.worse if comparison else None,
        p_value=comparison.p_value if comparison else None,
        held_out_also_trained=overlap.prompts if overlap else None,
        tasks=tuple(each.result for each in scored),
        grave_notices=(
            *(notice for each in rows for notice in worse_notices(each.compare_rows())),
            *(notice for each in scored if not each.task.held_out for notice in grave_notices(each.task, each.result)),
        ),
    )


def _sources(scored: Sequence[Scored]) -> dict[str, str]:
    """What was asked -> SHA-256: of one task as ever, of several by their names."""
    if len(scored) == 1:
        return {"questions": scored[0].task.sha256}
    return {f"questions of {each.task.name}": each.task.sha256 for each in scored}


def _write_rows(run: Run, scored: Sequence[Scored]) -> None:
    with replacing(run.logs / "eval_rows.jsonl") as file:
        for each in scored:
            for row in make_rows(each.task, each.base, each.tuned):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _keep_answers(run: Run) -> None:
    """Puts the answers of this record with those of the tasks that were there before."""
    done, answers = run.logs / DONE, run.logs / ANSWERS
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in (done, answers) if file.exists()]
    with replacing(done) as file:
        file.writelines(text if text.endswith("\n") else f"{text}\n" for text in texts)
    answers.unlink(missing_ok=True)


def _find_trained(run: Run, tasks: Sequence[OpenTask]) -> Overlap | None:
    """Which held-out rows were trained on, by the hashes that the data stage left; None where it left none."""
    trained = read_answers(run.data)
    held_out = next((task for task in tasks if task.held_out), None)
    if trained is None or held_out is None:
        return None
    rows = [
        Document(
            messages=(*question.messages, text_message("assistant", question.expected)),
            origin=question.origin,
            pictures=question.pictures,
        )
        for question in held_out.questions
    ]
    return find_overlap(trained, rows)
