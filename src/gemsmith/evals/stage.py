"""The stage `eval`: answers of the tuned and the base model to the same questions, scored and compared."""

import functools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.data.dataset import Dataset
from gemsmith.data.dedup import Overlap, find_overlap, overlap_notices, read_answers
from gemsmith.errors import InputError, RecipeError, RunError
from gemsmith.evals import results
from gemsmith.evals.cache import digest_model, keep_answers
from gemsmith.evals.generate import Answers, Model, answer_all
from gemsmith.evals.tasks import OpenTask, open_tasks
from gemsmith.recipe.load import differing_keys, load_recipe
from gemsmith.runs.eval_records import Elsewhere, EvalRecord
from gemsmith.runs.records import ExportRecord
from gemsmith.runs.run import Clock, Run, is_up_to_date, make_provenance, read_record, start_clock, write_record
from gemsmith.serve.client.endpoint import RemoteServer
from gemsmith.serve.settings import find_vllm
from gemsmith.serve.stage import Servers
from gemsmith.system.console import open_console, print_warnings
from gemsmith.system.files import atomic_write, sha256_file, sha256_json


def evaluate(
    run: Run, servers: Servers, *, force: bool = False, elsewhere: Mapping[str, RemoteServer] = MappingProxyType({})
) -> EvalRecord:
    """Scores tuned and base on the same questions and records both; each answer goes to logs/eval_rows.jsonl.

    Answers are kept as they come, and a second start, or one with other tasks, asks for the others only; with `force`,
    or where it is complete, for all. `elsewhere`: base or tuned -> a server to ask in place of the run's own.

    Raises RecipeError where there is nothing to score, DataError where a row has no answer to compare with, EngineError
    where a server dies again and again or too many requests fail, ScorerError where the scorer fails on as many.
    """
    clock = start_clock()
    own = {"tuned", "base"} - elsewhere.keys()
    tasks, dataset = open_tasks(run, elsewhere=elsewhere.keys())
    seen = next((question for task in tasks for question in task.questions if question.images), None)
    if seen and own and not servers.takes_images:
        why = f"no trained row has an image, and {seen.origin} of data.eval has one"
        raise RecipeError(f"serve.images: is false, {why}; set it to true")
    # By the hashes that the data stage left.
    trained = read_answers(run.data)
    overlap = find_overlap(trained, dataset.documents) if trained is not None and dataset is not None else None
    read_record(run, ExportRecord)
    if "tuned" in own:
        servers.check_verified()  # also where all answers are there from an earlier start
    if force := force or is_up_to_date(run, "eval"):
        _print_replaced(run, tasks)
    # Tuned first: its server is often still up from serve or bench, so that servers change once.
    answers: dict[str, list[Answers]] = {"tuned": [], "base": []}
    for role in ("tuned", "base"):
        model = _model(run, servers, role, elsewhere.get(role))
        for task in tasks:
            answers[role].append(found := answer_all(run, task, model, force=force))
            open_console().print(results.describe_scores(results.model_result(task, found), task.label(role)))
    scored = list(map(results.score_task, tasks, answers["base"], answers["tuned"]))
    record = _make_record(run, servers, elsewhere, clock, scored, dataset, overlap)
    with atomic_write(run.logs / "eval_rows.jsonl") as file:
        for each in scored:
            for row in results.generate_rows(each):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    keep_answers(run, force=force)
    return write_record(run, record)


def refuse_other_servers(run: Run, elsewhere: Mapping[str, RemoteServer]) -> None:
    """Raises InputError where the scores that would be kept are those of other servers than the ones to ask."""
    if is_up_to_date(run, "eval") and (kept := read_record(run, EvalRecord).elsewhere) != _answered(elsewhere):
        said = " and ".join(f"{server.model} at {server.url}" for server in kept.values()) or "the models of the run"
        raise InputError(f"{run.record_file('eval')}: has the scores of {said}; --force replaces them")


def _answered(elsewhere: Mapping[str, RemoteServer]) -> dict[str, Elsewhere]:
    return {role: Elsewhere(url=one.url, model=one.model, root=one.root) for role, one in elsewhere.items()}


def _model(run: Run, servers: Servers, role: str, elsewhere: RemoteServer | None) -> Model:
    if elsewhere is not None:
        made_by = [elsewhere.digest, run.recipe.data.image_tokens]
        return Model(role=role, digest=lambda most: sha256_json([*made_by, most]), start=lambda: elsewhere)
    if role == "tuned":
        start, folder, sha256 = servers.tuned, run.merged, sha256_file(run.record_file("export"))
    else:
        checkpoint = open_checkpoint(run.recipe.checkpoint)
        start, folder, sha256 = servers.base, checkpoint.folder, checkpoint.fingerprint()
    digest = functools.partial(digest_model, run, folder, sha256)
    return Model(role=role, digest=digest, start=start, stop=servers.stop)


def _print_replaced(run: Run, tasks: Sequence[OpenTask]) -> None:
    """Says how a record is to be replaced by another that is of other answers or settings."""
    try:
        old: EvalRecord = read_record(run, EvalRecord)
    except RunError:
        return
    before = sum(result.tuned.answers for result in old.tasks)
    after = sum(len(task.questions) * task.asked.samples for task in tasks)
    keys = differing_keys(load_recipe(run.recipe_file), run.recipe).items()
    changes = [f"{key}: {json.dumps(was)} -> {json.dumps(now)}" for key, (was, now) in keys]
    if changes or before != after:
        replaced = f"the record of {before} answers of each model is replaced by one of {after} once that is complete"
        print_warnings("eval", ["; ".join([replaced, *changes])])


def _make_record(
    run: Run,
    servers: Servers,
    elsewhere: Mapping[str, RemoteServer],
    clock: Clock,
    scored: Sequence[results.ScoredTask],
    dataset: Dataset | None,
    overlap: Overlap | None,
) -> EvalRecord:
    first, rows = scored[0], [each for each in scored if each.task.held_out]
    if len(scored) == 1:
        sources = {"questions": first.task.asked.questions_sha256}
    else:
        sources = {f"questions of {each.task.name}": each.task.asked.questions_sha256 for each in scored}
    vllm = ""
    if not {"tuned", "base"} <= elsewhere.keys():
        engine = find_vllm(run.recipe.serve.python)
        vllm = f"{engine.package} {engine.version}"
    warnings = [*servers.warnings]
    for role, server in elsewhere.items():
        warnings.append(f"The {role} model is {server.model} at {server.url}: Gemsmith has not checked its weights.")
    for each in scored:
        warnings += results.answer_notices(each)
    warnings += results.image_notices(rows[0].task) if rows else ()
    for each in scored:
        warnings += results.result_notices(each)
    warnings += overlap_notices(overlap) if rows else ()
    return EvalRecord(
        provenance=make_provenance(run, "eval", clock, sources=sources, engine=vllm),
        server=first.base.server,
        elsewhere=_answered(elsewhere),
        warnings=tuple(warnings),
        scorer=first.result.task,
        ignored_columns=dict(dataset.ignored_columns) if dataset else {},
        base=first.result.base.score,
        tuned=first.result.tuned.score,
        examples=results.make_examples(first),
        held_out_also_trained=overlap.counts.same_prompt if overlap else None,
        tasks=tuple(each.result for each in scored),
        critical_warnings=tuple(line for each in scored for line in results.critical_warnings(each)),
    )
