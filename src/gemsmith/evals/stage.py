"""The stage `eval`: answers of the tuned and the base model to the same questions, scored and compared."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from gemsmith.checkpoints import open_checkpoint
from gemsmith.data.dataset import Dataset
from gemsmith.data.dedup import Overlap, find_overlap, overlap_notices, read_answers
from gemsmith.data.documents import Document
from gemsmith.errors import RecipeError, RunError
from gemsmith.evals.cache import digest_model
from gemsmith.evals.generate import AGAIN, ANSWERS, DONE, Answers, Model, answer_all, kept_files
from gemsmith.evals.metrics import Comparison, compare, unmoved_notices, worse_notices
from gemsmith.evals.results import (
    answer_notices,
    choose_examples,
    critical_warnings,
    generate_rows,
    image_notices,
    make_result,
    print_scores,
    source_notices,
)
from gemsmith.evals.tasks import OpenTask, open_tasks
from gemsmith.recipe.load import differing_keys, load_recipe
from gemsmith.runs.eval_records import EvalRecord, TaskResult
from gemsmith.runs.provenance import Clock, start_clock
from gemsmith.runs.records import ExportRecord
from gemsmith.runs.run import Run, is_up_to_date, read_record, write_record
from gemsmith.serve.settings import find_vllm
from gemsmith.serve.stage import Servers, origin_with_engine
from gemsmith.system.console import open_console
from gemsmith.system.files import atomic_write, sha256_file
from gemsmith.tasks.messages import text_message


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
        pairs = [pair for pair in pairs if not any(one.failed or one.ungraded for one in pair)]
        return compare([one.right for one, _ in pairs], [other.right for _, other in pairs])


def evaluate(run: Run, servers: Servers, *, fresh: bool = False) -> EvalRecord:
    """Scores tuned and base on the same questions and records both; each answer goes to logs/eval_rows.jsonl.

    Answers are kept in logs/eval_answers.jsonl as they come, and a second start asks for the others only. So does one
    with other tasks. `fresh`, or where it is complete, it asks for all, and what is there is replaced at its end.

    Raises RecipeError where there is nothing to score, DataError where a row has no answer to compare with, EngineError
    where a server dies again and again or too many requests fail, ScorerError where the scorer fails on as many.
    """
    clock = start_clock()
    tasks, dataset = open_tasks(run)
    _check_images(tasks, servers)
    overlap = _find_trained(run, tasks)
    read_record(run, ExportRecord)
    servers.check_verified()  # also where all answers are there from an earlier start
    if fresh := fresh or is_up_to_date(run, "eval"):
        _say_replaced(run, tasks)
    # Tuned first: its server is often still up from serve or bench, so that servers change once.
    tuned, base = (_answer_tasks(run, tasks, model, fresh=fresh) for model in _models(run, servers))
    scored = [
        Scored(task=task, base=one, tuned=other, result=make_result(task, one, other))
        for task, one, other in zip(tasks, base, tuned, strict=True)
    ]
    record = _make_record(run, servers, clock, scored, dataset, overlap)
    _write_rows(run, scored)
    _keep_answers(run, fresh=fresh)
    write_record(run, record)
    return record


def _say_replaced(run: Run, tasks: Sequence[OpenTask]) -> None:
    """Says how a record is to be replaced by another that is of other answers or settings."""
    try:
        old: EvalRecord = read_record(run, EvalRecord)
    except RunError:
        return
    before = sum(result.tuned.answers for result in old.tasks) or old.tuned.n
    after = sum(len(task.questions) * task.sampling.samples for task in tasks)
    keys = differing_keys(load_recipe(run.recipe_file), run.recipe).items()
    changes = [f"{key}: {json.dumps(was)} -> {json.dumps(now)}" for key, (was, now) in keys]
    if changes or before != after:
        replaced = f"the record of {before} answers of each model is replaced by one of {after} once that is complete"
        open_console().print("; ".join([f"eval: notice: {replaced}", *changes]), style="yellow")


def _check_images(tasks: Sequence[OpenTask], servers: Servers) -> None:
    seen = next((question for task in tasks for question in task.questions if question.images), None)
    if seen and not servers.takes_images:
        raise RecipeError(
            f"serve.images: is false, no trained row has a image, and {seen.origin} of data.eval has one; set it "
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


def _answer_tasks(run: Run, tasks: Sequence[OpenTask], model: Model, *, fresh: bool) -> list[Answers]:
    found = []
    for task in tasks:
        answers = answer_all(run, task, model, fresh=fresh)
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
    comparison, engine = first.compare_rows() if first.task.held_out else None, find_vllm(run.recipe.serve.python)
    vllm = f"{engine.package} {engine.version}"
    return EvalRecord(
        origin=origin_with_engine(run, "eval", clock, vllm, sources=_sources(scored)),
        server=first.base.server,
        warnings=(
            *servers.warnings,
            *(
                notice
                for each in scored
                for role, answers in (("base", each.base), ("tuned", each.tuned))
                for notice in answer_notices(each.task, role, answers)
            ),
            *(notice for each in rows[:1] for notice in image_notices(each.task)),
            *(notice for each in rows for notice in unmoved_notices(each.compare_rows())),
            *(notice for each in scored if not each.task.held_out for notice in source_notices(each.task, each.result)),
            *(overlap_notices(overlap) if rows else ()),
        ),
        scorer=first.result.task,
        ignored_columns=dict(dataset.ignored_columns) if dataset else {},
        base=first.result.base.score,
        tuned=first.result.tuned.score,
        examples=choose_examples(list(generate_rows(first.task, first.base, first.tuned))),
        rows_better=comparison.better if comparison else None,
        rows_worse=comparison.worse if comparison else None,
        p_value=comparison.p_value if comparison else None,
        held_out_also_trained=overlap.prompts if overlap else None,
        tasks=tuple(each.result for each in scored),
        critical_warnings=(
            *(notice for each in rows for notice in worse_notices(each.compare_rows())),
            *(
                notice
                for each in scored
                if not each.task.held_out
                for notice in critical_warnings(each.task, each.result)
            ),
        ),
    )


def _sources(scored: Sequence[Scored]) -> dict[str, str]:
    """What was asked -> SHA-256: of one task as ever, of several by their names."""
    if len(scored) == 1:
        return {"questions": scored[0].task.sha256}
    return {f"questions of {each.task.name}": each.task.sha256 for each in scored}


def _write_rows(run: Run, scored: Sequence[Scored]) -> None:
    with atomic_write(run.logs / "eval_rows.jsonl") as file:
        for each in scored:
            for row in generate_rows(each.task, each.base, each.tuned):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _keep_answers(run: Run, *, fresh: bool) -> None:
    """Puts the answers of this record with those of the tasks that were there before, or in their place."""
    files = [run.logs / name for name in kept_files(fresh=fresh)]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.exists()]
    with atomic_write(run.logs / DONE) as file:
        file.writelines(text if text.endswith("\n") else f"{text}\n" for text in texts)
    for name in (ANSWERS, AGAIN):
        (run.logs / name).unlink(missing_ok=True)


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
            images=question.images,
        )
        for question in held_out.questions
    ]
    return find_overlap(trained, rows)
