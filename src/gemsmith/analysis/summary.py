"""What the records of a run say: which are there, the numbers that stand for them, what a reader must know first."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemsmith.analysis.sides import Side, side_of_run
from gemsmith.errors import InputError, RunError, some
from gemsmith.hardware import load_catalog, machines_with
from gemsmith.recipe.schema import eval_tasks
from gemsmith.recipe.serving import AT_ONCE
from gemsmith.runs.bench_records import BenchCell, BenchRecord, Saturation
from gemsmith.runs.eval_records import EvalRecord, LmEvalRecord, Share
from gemsmith.runs.plan_records import MachinePlan, PlanRecord
from gemsmith.runs.records import DataRecord, ExportRecord, Record, ServeRecord, TrainRecord, VerifyRecord
from gemsmith.runs.run import Run, find_run, is_stale, is_up_to_date, read_record, unproven_keys
from gemsmith.runs.stages import STAGES
from gemsmith.system.format import count, decimal, duration, fraction, interval, percent, plain, rate
from gemsmith.train.logging import trained_s
from gemsmith.train.loss_checks import best_evaluation

_NAMED_STEPS = 5
_READ = ("data", "train", "export", "bench", "eval")  # stages whose numbers are compared; of the plan prices alone are


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """The records of a run, None where there is none that can be read; `problems` or `left_out` says why."""

    run: Run
    plan: PlanRecord | None
    data: DataRecord | None
    train: TrainRecord | None
    export: ExportRecord | None
    verify: VerifyRecord | None
    serve: ServeRecord | None
    bench: BenchRecord | None
    eval: EvalRecord | None
    lm_eval: LmEvalRecord | None  # of lm-evaluation-harness; no stage, so that none need be there
    problems: dict[str, str]
    left_out: dict[str, str]  # stages that the recipe does not ask for, and why
    stale: tuple[str, ...]
    """Stages whose record was made from another recipe, or from an earlier record that has been replaced since."""

    def records(self) -> dict[str, Record]:
        """The records that are there, in the order of the stages."""
        return {stage: record for stage in STAGES if (record := getattr(self, stage)) is not None}

    @property
    def model(self) -> str:
        """Its name as the records have it, or as the recipe asks for it."""
        recorded = (self.train.model if self.train else None) or (self.plan.model if self.plan else None)
        return recorded or self.run.recipe.model or self.run.recipe.checkpoint

    def why_missing(self, stage: str) -> str:
        return self.problems.get(stage) or self.left_out[stage]


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something that changes how the rest is to be read. `critical`: a result must not be used as it is."""

    text: str
    critical: bool = False


def read_findings(run: Run) -> RunRecords:
    """All records of a run directory. A missing or unreadable one becomes an entry of `problems`, never an error."""
    records, problems, left_out = dict[str, Any](), dict[str, str](), dict[str, str]()
    kinds: list[type[Record]] = [*(stage.record for stage in STAGES.values()), LmEvalRecord]
    for kind in kinds:
        stage, file = kind.stage, run.record_file(kind.stage)
        try:
            records[stage] = read_record(run, kind)
        except (RunError, OSError, RecursionError) as error:
            records[stage] = None
            if not file.exists():
                if stage == "eval" and not eval_tasks(run.recipe):
                    left_out[stage] = "Left out: data.eval names no held-out rows."
                elif stage in STAGES:
                    problems[stage] = f"No {stage}.json in this run: gemsmith {stage} makes it."
            elif isinstance(error, RunError):
                problems[stage] = str(error)
            else:
                reason = error.strerror if isinstance(error, OSError) else "it is nested too deeply"
                problems[stage] = f"{file}: cannot be read ({reason}); remove it, then run: gemsmith {stage}"
    stale = tuple(stage for stage in STAGES if records[stage] and is_stale(run, records[stage]))
    return RunRecords(**records, run=run, problems=problems, left_out=left_out, stale=stale)


def find_notices(findings: RunRecords) -> list[Notice]:
    """What the reader must know before the numbers, the gravest first."""
    notices = list(_stage_notices(findings))
    for record in (*findings.records().values(), *([findings.lm_eval] if findings.lm_eval else [])):
        notices += [Notice(critical=True, text=text) for text in record.critical_warnings]
        # Of held-out rows eval has looked at itself since; the data stage's may have been others.
        old = isinstance(record, DataRecord) and findings.eval is not None
        notices += [Notice(text=text) for text in record.warnings if not (old and text.startswith("data.eval: "))]
    floors = side_of_run("", "", findings.run.recipe, findings.records()).below_the_floor()
    notices += [Notice(text=f"The load test: {line}") for line in floors]
    if findings.stale:
        made_from = "Made from other settings or an earlier record than those now in the run directory"
        notices.append(Notice(text=f"{made_from}: {', '.join(findings.stale)}."))
    if findings.problems:
        notices.append(Notice(text=f"No record of: {', '.join(findings.problems)}. The page holds what there is."))
    return sorted(notices, key=lambda notice: not notice.critical)


def _stage_notices(findings: RunRecords) -> Iterator[Notice]:
    train = findings.train
    if train and not all(step.skipped or abs(step.loss) < float("inf") for step in train.steps):
        yield Notice(critical=True, text="The training loss is not finite at some steps. The curves leave those out.")
    if train and train.skipped:
        why = "the loss or the gradient norm was a spike, or NaN or infinite"
        yield Notice(text=f"The updates of {_steps(train.skipped)} were left out: {why}.")
    if train and (spikes := sorted(set(train.spikes) - set(train.skipped))):
        yield Notice(text=f"The loss had a spike at {_steps(spikes)}.")
    checks = findings.verify.checks if findings.verify else ()
    if findings.verify and not findings.verify.passed:
        failed = ", ".join(check.name for check in checks if check.passed is False) or "see the checks"
        yield Notice(critical=True, text=f"Verification failed: {failed}. Do not use these weights.")
    # A record that has the causes says so itself.
    cells = [] if findings.bench is None else [cell for cell in findings.bench.cells if not cell.failures]
    if failed_requests := sum(cell.failed for cell in cells):
        asked = failed_requests + sum(cell.completed + cell.cut for cell in cells)
        share = f"{count(failed_requests)} of {count(asked)} requests of the load test failed"
        yield Notice(text=f"{share}; the latencies are those of the others.")
    if undone := [check.name for check in checks if check.passed is None]:
        yield Notice(text=f"Verification is partial, not done here: {', '.join(undone)}.")
    if findings.eval and (cut := findings.eval.base.cut + findings.eval.tuned.cut):
        tuned = f"{count(findings.eval.tuned.cut)} of the tuned model"
        yield Notice(text=f"{count(cut)} answers reached eval.max_tokens before they had ended ({tuned}).")


def _steps(numbers: Sequence[int]) -> str:
    """[3, 4, 9] → "steps 3, 4, 9"; of many only the first few."""
    return f"step{'s' * (len(numbers) > 1)} {some([str(number) for number in numbers], _NAMED_STEPS)}"


def middle_cell(bench: BenchRecord) -> BenchCell | None:
    """The grid's cell at the middle input length and rate, the lower of two, of those that completed any request."""
    if not (cells := [cell for cell in bench.cells if cell.completed and not cell.probe]):
        return None
    length = statistics.median_low({cell.input_tokens for cell in cells})
    row = [cell for cell in cells if cell.input_tokens == length]
    return sorted(row, key=lambda cell: (cell.request_rate, cell.output_tokens))[(len(row) - 1) // 2]


def saturation_rate(found: Saturation) -> str:
    """What the search for the rate at which a server saturates has found, in requests a second."""
    if found.held_at is None:
        return f"below {plain(found.exceeded_at or 0)}"
    if found.exceeded_at is None:
        return f"not up to {plain(found.held_at)}"
    return f"{plain(found.held_at)} to {plain(found.exceeded_at)}"


def saturation_lines(bench: BenchRecord) -> list[str]:
    """The same for each length."""
    return [
        f"{count(each.input_tokens)} tokens in and {count(each.output_tokens)} out: {saturation_rate(each)} requests/s"
        for each in bench.saturations
    ]


def fastest_cell(cells: Iterable[BenchCell]) -> BenchCell | None:
    measured = (cell for cell in cells if cell.completed and math.isfinite(cell.output_tokens_per_s))
    return max(measured, key=lambda cell: cell.output_tokens_per_s, default=None)


def load_words(cell: BenchCell) -> str:
    return f"{count(cell.input_tokens)} in, {rate(cell.request_rate, cell.max_concurrency)}"


def score_words(score: Share) -> str:
    """A score, or one of its kin, with its 95 % interval."""
    return f"{fraction(score.score)} ({interval(score.low, score.high)})"


def cheapest_machine(plan: PlanRecord) -> MachinePlan | None:
    """Of the machines that fit and have a price, the one with the lowest upper cost."""
    priced = [machine for machine in plan.machines if machine.fits and machine.usd is not None]
    return min(priced, key=lambda machine: machine.usd[1] if machine.usd else 0.0, default=None)


def count_checks(verify: VerifyRecord) -> str:
    outcomes = [check.passed for check in verify.checks]
    words = [(outcomes.count(True), "passed"), (outcomes.count(False), "failed"), (outcomes.count(None), "not done")]
    return ", ".join(f"{number} {word}" for number, word in words if number) or "no check"


def trained_tokens(train: TrainRecord) -> int:
    return sum(step.real_tokens for step in train.steps)


def held_out_words(train: TrainRecord) -> str:
    """The last loss on held-out rows while it trained, and the least, of a training that has any."""
    final, best = train.evaluations[-1], best_evaluation(train.evaluations)
    kept = ", which export takes" if train.kept == "best" else ""
    return f"{decimal(final.loss)}, the least {decimal(best.loss)} at step {count(best.step)}{kept}"


def total_s(findings: RunRecords) -> float:
    """Seconds that the recorded stages took, one after the other."""
    return sum(map(stage_s, findings.records().values()))


def stage_s(record: Record) -> float:
    """Seconds that a stage took: what is paid for."""
    return trained_s(record) if isinstance(record, TrainRecord) else record.provenance.duration_s


def read_sides(folders: Sequence[Path], *, trained_on: Sequence[str] = (), served_on: Sequence[str] = ()) -> list[Side]:
    """A side for each run directory, under its name, or its path where two have the same.

    `trained_on`, `served_on`: MACHINE for all runs, or NAME=MACHINE for one. Raises RunError for a folder that is no
    run, VersionError for a record that another version wrote, InputError for a machine that its plan does not have.
    """
    names = [folder.resolve().name for folder in folders]
    names = [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name}: is given twice; name each run once")
    trained, served = _named("trained-on", trained_on, names), _named("served-on", served_on, names)
    return [
        read_side(folder, name, trained_on=trained.get(name), served_on=served.get(name))
        for name, folder in zip(names, folders, strict=True)
    ]


def read_side(folder: Path, name: str, *, trained_on: str | None = None, served_on: str | None = None) -> Side:
    """One of them; what is missing or cannot be read is a line of it, never an error but of another version."""
    run = Run(path=folder, recipe=find_run(folder))
    for stage in STAGES:
        is_up_to_date(run, stage)  # for its VersionError; what is damaged, a line of the side says
    findings = read_findings(run)
    planned = [plan.name for plan in findings.plan.machines] if findings.plan else []
    for option, machine in (("trained-on", trained_on), ("served-on", served_on)):
        if machine is not None and machine not in planned:
            raise InputError(
                f"--{option} {machine}: the plan of {name} does not have it; it has {', '.join(planned) or 'none'}; "
                f"add it to hardware.machines and run: gemsmith plan {folder}"
            )
    if trained_on is not None and findings.train is not None:
        # A price of chips that training has not seen would make a cost that nobody pays.
        devices, catalog = findings.train.provenance.machine.accelerators, load_catalog(run.recipe.hardware.catalog)
        having = [found.name for found in machines_with(catalog, devices, [trained_on])]
        if having and trained_on not in having:
            has = f"{len(devices)} x {devices[0]}" if devices else "no accelerator"
            raise InputError(
                f"--trained-on {trained_on}: the train record of {name} has {has}, so it was trained on "
                f"{' or '.join(having)}"
            )
    return side_of_run(
        name,
        str(folder),
        run.recipe,
        findings.records(),
        missing=_missing(findings, run),
        trained_on=trained_on,
        served_on=served_on,
        stale=findings.stale,
        unproven=unproven_keys(run, (record for stage, record in findings.records().items() if stage in _READ)),
    ).model_copy(update={"figures": dict(_figures(findings))})


def _figures(findings: RunRecords) -> Iterator[tuple[str, str]]:
    """What arXiv 2605.25645 reports beside numbers that are compared, under the names of its record."""
    data, train, serve = findings.data, findings.train, findings.serve
    if data is not None:
        left_out = "".join(f", {count(number)} {why}" for why, number in data.dropped.items())
        yield "rows that were kept", f"{count(data.rows)} of {count(data.rows + sum(data.dropped.values()))}{left_out}"
    if train is not None and (steps := train.steps):
        recipe = findings.run.recipe
        row_s = sum(step.step_s for step in steps) / (len(steps) * recipe.train.global_batch_size)
        yield "seconds a sample", f"{decimal(row_s)}, of rows of {count(recipe.data.max_length)}"
        yield "final training loss", decimal(steps[-1].loss)
        if steps[-1].token_accuracy is not None:
            yield "final token accuracy", percent(steps[-1].token_accuracy)
        norms = [step.grad_norm for step in steps]
        yield "gradient norm", f"{decimal(min(norms))} to {decimal(max(norms))}"
        yield "first step", f"compiled in {duration(train.compile_s)}{', from the cache' * train.compiled_from_cache}"
    for task in findings.eval.tasks if findings.eval else ():
        if task.samples > 1:
            shares = [each.passed / each.samples for each in task.tuned.problems if each.samples and not each.ungraded]
            yield "problems with all answers right, with none", f"{shares.count(1.0)}, {shares.count(0.0)}"
    if serve is not None:
        yield "first start of the server", f"up after {duration(serve.start_s)}"
    bench = findings.bench
    for cell in bench.cells if bench else ():
        if cell.completed and (cell.input_tokens, cell.output_tokens, cell.request_rate) == (128, 256, AT_ONCE):
            yield "P99 ITL, 128 in, 256 out, 10,000 requests/s", f"{decimal(cell.itl_ms.p99)} ms"
    for found in bench.saturations if bench else ():
        if (found.input_tokens, found.output_tokens) == (1024, 512):
            yield "saturates at, 1,024 in, 512 out", f"{saturation_rate(found)} requests/s"
    if bench and bench.server and bench.server.max_model_len is not None:
        yield "context of the server", count(bench.server.max_model_len)
    if bench and bench.server and bench.server.kv_cache_dtype is not None:
        yield "KV cache", bench.server.kv_cache_dtype


def _named(option: str, given: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Run -> machine."""
    machines: dict[str, str] = {}
    for text in given:
        name, equals, machine = text.rpartition("=")
        if equals and name not in names:
            raise InputError(f"--{option} {text}: {name} is not one of the runs; these are {', '.join(names)}")
        machines |= {name: machine} if equals else dict.fromkeys(names, machine)
    return machines


def _missing(findings: RunRecords, run: Run) -> tuple[str, ...]:
    absent = [stage for stage in findings.problems if not run.record_file(stage).exists()]
    lines = [f"no record of {', '.join(absent)}; gemsmith run {run.path} makes them."] if absent else []
    lines += [line for stage, line in findings.problems.items() if stage not in absent]
    lines += findings.left_out.values()
    lines += [notice.text for notice in find_notices(findings) if notice.critical]
    if findings.stale:
        lines.append(f"made from other settings than the recipe there now: {', '.join(findings.stale)}.")
    machines = findings.plan.machines if findings.plan else ()
    priced = [machine.name for machine in machines if machine.price or machine.price_spot]
    trained_on = findings.train.machine if findings.train else None
    if findings.plan and (not priced or trained_on not in (None, *priced)):
        of = f" of {trained_on}, which trained; add it to hardware.machines" if priced else ""
        lines.append(f"plan.json says no price of an hour{of}, so there is no cost; run: gemsmith plan {run.path}")
    return tuple(lines)
