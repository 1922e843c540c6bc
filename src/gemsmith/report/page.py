"""The report's HTML, from the records of a run: gathers what the template shows, and renders it."""

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemsmith.errors import MachineError
from gemsmith.eval_records import EvalRecord
from gemsmith.recipe import Optimizer
from gemsmith.records import DataRecord, Machine, TrainRecord, TrainStep
from gemsmith.report import numbers
from gemsmith.report.findings import (
    Findings,
    cheapest_machine,
    count_checks,
    fastest_cell,
    find_notices,
    middle_cell,
    read_findings,
    saturation_lines,
    total_s,
    verdict,
)
from gemsmith.run import Run

MOST_CHARACTERS = 2_000
"""Of one text of an example. A page must stay small enough to send, whatever the rows hold."""
MOST_EXAMPLES = 12
_STEP_ROWS = 24
_FILTERS = (
    numbers.count,
    numbers.decimal,
    numbers.duration,
    numbers.fraction,
    numbers.memory,
    numbers.moment,
    numbers.percent,
    numbers.plain,
    numbers.rate,
    numbers.rough,
    numbers.short_hash,
    numbers.size,
    numbers.usd,
)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A headline number. `value` None: the record is missing, `note` says so."""

    label: str
    value: str | None
    note: str
    modelled: bool = False
    before: str | None = None
    """What it was at first, where the number is a change."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one model wrote, cut in three so that the part that differs from what was expected can be marked."""

    name: str
    right: bool | None
    cut: bool
    """Whether the model was stopped before it had ended."""
    start: str
    differs: str
    end: str
    omitted: int


def render_page(run: Run) -> str:
    """The whole page. Raises MachineError where matplotlib or Jinja is not installed."""
    environment = open_environment()
    from gemsmith.report import charts

    findings = read_findings(run)
    drawn: dict[str, Any] = {
        "training": charts.training_charts(findings.train, run.recipe.optimizer.clip_norm) if findings.train else [],
        "bench": charts.bench_charts(findings.bench.cells) if findings.bench else [],
        "scores": charts.score_chart(findings.eval) if findings.eval else None,
    }
    html = environment.get_template("page.html").render(charts=drawn, **_context(run, findings))
    return html.encode("utf-8", "replace").decode()


def open_environment() -> Any:
    """Jinja's environment of the pages. Raises MachineError where matplotlib or Jinja is not installed."""
    for name in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise MachineError(f"report: {name} is not installed; run: pip install 'gemsmith[report]'")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    environment.filters |= {function.__name__: function for function in _FILTERS}
    environment.globals["span"] = numbers.span
    return environment


def _context(run: Run, findings: Findings) -> dict[str, Any]:
    records = findings.records()
    return {
        "run_name": run.path.resolve().name,
        "recipe": run.recipe,
        "found": findings,
        "records": records,
        "notices": find_notices(findings),
        "tiles": _tiles(findings),
        "model": _model(run, findings),
        "started": min((record.origin.started for record in records.values()), default=None),
        "total_s": total_s(findings),
        "longest_s": max((record.origin.duration_s for record in records.values()), default=0.0),
        "machines": _machines(findings),
        "versions": _versions(findings),
        "settings": list(_settings(run, findings.train)),
        "positions": _positions(findings.data) if findings.data else [],
        "longest_tokens": max((1, *findings.data.length_percentiles.values())) if findings.data else 1,
        "step_rows": _step_rows(findings.train) if findings.train else [],
        "cells": sorted(findings.bench.cells, key=lambda cell: (cell.input_tokens, cell.request_rate))
        if findings.bench
        else [],
        "checks": count_checks(findings.verify) if findings.verify else None,
        "saturations": saturation_lines(findings.bench) if findings.bench else [],
        "fastest": fastest_cell(findings.bench) if findings.bench else None,
        "verdict": verdict(findings.eval) if findings.eval else None,
        "examples": list(_examples(findings.eval)) if findings.eval else [],
        "recipe_lines": _recipe_lines(run),
    }


def _tiles(findings: Findings) -> list[Tile]:
    return [
        _score_tile(findings),
        _loss_tile(findings),
        _speed_tile(findings),
        _latency_tile(findings),
        _cost_tile(findings),
    ]


def _score_tile(findings: Findings) -> Tile:
    if findings.eval is None:
        return Tile(label="Score", value=None, note="no eval record")
    base, tuned = findings.eval.base, findings.eval.tuned
    ranges = [f"{numbers.fraction(score.low)}–{numbers.fraction(score.high)}" for score in (base, tuned)]
    note = f"95 % intervals {ranges[0]} and {ranges[1]}; {numbers.count(tuned.n)} {_questions(findings.eval)}"
    return Tile(
        label="Score, base → tuned", value=numbers.fraction(tuned.score), before=numbers.fraction(base.score), note=note
    )


def _questions(scores: EvalRecord) -> str:
    return "problems" if scores.tasks and scores.tasks[0].tuned.problems else "held-out rows"


def _loss_tile(findings: Findings) -> Tile:
    if findings.train is None or not findings.train.steps:
        return Tile(label="Final loss", value=None, note="no train record")
    first, last = findings.train.steps[0], findings.train.steps[-1]
    note = f"step {numbers.count(last.step)}"
    if last.step != first.step:
        note += f"; {numbers.decimal(first.loss)} at step {numbers.count(first.step)}"
    return Tile(label="Final loss", value=numbers.decimal(last.loss), note=note)


def _speed_tile(findings: Findings) -> Tile:
    if findings.train is None:
        return Tile(label="Training speed", value=None, note="no train record")
    note = "real tokens/s, without padding"
    return Tile(label="Training speed", value=numbers.decimal(findings.train.real_tokens_per_s), note=note)


def _latency_tile(findings: Findings) -> Tile:
    cell = middle_cell(findings.bench) if findings.bench else None
    if cell is None:
        return Tile(
            label="TTFT p50", value=None, note="no bench record" if findings.bench is None else "no request completed"
        )
    note = (
        f"{numbers.count(cell.input_tokens)} tokens in, {numbers.count(cell.output_tokens)} out, "
        f"{numbers.rate(cell.request_rate, cell.max_concurrency)}"
    )
    return Tile(label="TTFT p50", value=numbers.decimal(cell.ttft_ms.p50) + "\u00a0ms", note=note)


def _cost_tile(findings: Findings) -> Tile:
    label = "Training cost"
    if findings.plan is None:
        return Tile(label=label, value=None, note="no plan record", modelled=True)
    machine = cheapest_machine(findings.plan)
    if machine is None or machine.usd is None:
        return Tile(label=label, value=None, note="no machine that fits has a price", modelled=True)
    low, high = machine.usd
    note = f"{numbers.count(findings.plan.priced_steps)} steps on {machine.name}, the cheapest that fits"
    return Tile(label=label, value=numbers.span(numbers.usd(low), numbers.usd(high)), note=note, modelled=True)


def _model(run: Run, findings: Findings) -> str:
    recorded = (findings.train.model if findings.train else None) or (findings.plan.model if findings.plan else None)
    return recorded or run.recipe.model or run.recipe.checkpoint


def _machines(findings: Findings) -> list[tuple[Machine, list[str]]]:
    """Each machine, with the stages that ran on it."""
    machines: dict[Machine, list[str]] = {}
    for stage, record in findings.records().items():
        machines.setdefault(record.origin.machine, []).append(stage)
    return list(machines.items())


def _versions(findings: Findings) -> dict[str, list[str]]:
    """Package -> the versions that took part.

    More than one where stages differ, as training's and serving's environments may.
    """
    versions: dict[str, set[str]] = {}
    for record in findings.records().values():
        for name, version in {"gemsmith": record.origin.gemsmith, **record.origin.versions}.items():
            versions.setdefault(name, set()).add(version)
    return {
        name: sorted(versions[name]) for name in sorted(versions, key=lambda name: (name != "gemsmith", name.lower()))
    }


def _warmup(optimizer: Optimizer, trained: TrainRecord | None) -> str:
    if optimizer.warmup_ratio is not None:
        return f"warm-up in {100 * optimizer.warmup_ratio:g} % of the steps"
    steps = optimizer.warmup_steps
    if trained is not None and steps is None:
        steps = 100 if trained.warmup_steps is None else trained.warmup_steps  # see TrainRecord
    return "warm-up in a tenth of the steps, at most 100" if steps is None else f"{numbers.count(steps)} warm-up steps"


def _settings(run: Run, trained: TrainRecord | None) -> Iterator[tuple[str, str]]:
    """The recipe in a few lines."""
    recipe = run.recipe
    lora, optimizer, train = recipe.lora, recipe.optimizer, recipe.train
    rows = recipe.data.train
    yield "Data", rows if isinstance(rows, str) else f"{numbers.count(rows.rows)} made rows of the {rows.task} task"
    dropout = f", dropout {numbers.plain(lora.dropout)}" if lora.dropout else ""
    scale = f"{'rsLoRA with ' if lora.rslora else ''}alpha {numbers.plain(lora.alpha)}"
    yield "LoRA", f"rank {lora.rank}, {scale}{dropout}, on {', '.join(lora.targets)}"
    decay = f"decay {numbers.plain(optimizer.weight_decay)}"
    clip = f"clip {numbers.plain(optimizer.clip_norm)}" if optimizer.clip_norm else "no clipping"
    yield (
        "AdamW",
        f"peak {numbers.plain(optimizer.learning_rate)}, {optimizer.schedule}, {_warmup(optimizer, trained)}, {decay}, "
        f"{clip}",
    )
    packed = "packed" if recipe.data.packing else "not packed"
    yield "Step", f"{train.rows_per_step} rows of {numbers.count(recipe.data.max_length)} tokens, {packed}"
    length = (
        f"{numbers.count(train.optimizer_steps)} steps"
        if train.optimizer_steps
        else f"{train.epochs} epoch{'s' if train.epochs > 1 else ''}"
    )
    yield "Length", f"{length}, backend {train.backend}, {train.dtype}, seed {recipe.seed}"


def _positions(data: DataRecord) -> list[tuple[str, float, str]]:
    """What the positions of the packed rows hold, as shares of 1: name, share, colour."""
    if not data.tokens:
        return []
    supervised = data.packing_efficiency * data.supervised_tokens / data.tokens
    return [
        ("supervised tokens", supervised, "s1"),
        ("prompt and template tokens", data.packing_efficiency - supervised, "s1-soft"),
        ("padding", 1 - data.packing_efficiency, "line-strong"),
    ]


def _step_rows(train: TrainRecord) -> list[TrainStep]:
    """Some steps, evenly spread, with the first and the last."""
    last = len(train.steps) - 1
    if last < _STEP_ROWS:
        return list(train.steps)
    return [train.steps[round(row * last / (_STEP_ROWS - 1))] for row in range(_STEP_ROWS)]


def _examples(scores: EvalRecord) -> Iterator[dict[str, Any]]:
    for number, example in enumerate(scores.examples[:MOST_EXAMPLES], 1):
        expected = str(example.get("expected", ""))
        yield {
            "number": number,
            "prompt": _text(str(example.get("prompt", ""))),
            "expected": _text(expected),
            "answers": [_answer(name, example, expected) for name in ("base", "tuned")],
        }


def _text(text: str) -> Answer:
    """A text cut to what the page has room for, nothing marked."""
    omitted = max(0, len(text) - MOST_CHARACTERS)
    return Answer(name="", right=None, cut=False, start=text[:MOST_CHARACTERS], differs="", end="", omitted=omitted)


def _answer(name: str, example: dict[str, Any], expected: str) -> Answer:
    """A model's answer; in a wrong one, the part that is not as expected stands alone."""
    right = example.get(f"{name}_right")
    plain = replace(_text(str(example.get(name, ""))), name=name, right=right, cut=example.get(f"{name}_cut") is True)
    if right is not False:
        return plain
    text = plain.start
    start = _common(text, expected)
    end = min(_common(text[::-1], expected[::-1]), len(text) - start, len(expected) - start) if not plain.omitted else 0
    middle = len(text) - end
    return replace(plain, start=text[:start], differs=text[start:middle], end=text[middle:])


def _common(one: str, other: str) -> int:
    """How many characters two texts share from their start."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _recipe_lines(run: Run) -> list[tuple[str, str]]:
    """Each line of the resolved recipe, cut in what it sets and why; empty where the file is gone."""
    if not run.recipe_file.exists():
        return []
    return [_cut_reason(line) for line in run.recipe_file.read_text(encoding="utf-8").splitlines()]


def _cut_reason(line: str) -> tuple[str, str]:
    """A line of the resolved recipe in two, after its value.

    >>> _cut_reason('  template: "a  # b"  # the checkpoint has one')
    ('  template: "a  # b"', '# the checkpoint has one')
    """
    key = re.match(r"\s*[\w-]+: ", line)
    if key is None:
        return line, ""
    try:
        _, end = json.JSONDecoder().raw_decode(line, key.end())
    except json.JSONDecodeError:
        return line, ""
    return line[:end], line[end:].strip()


def _printable(value: Any) -> Any:
    """Control characters as pictures, and those that turn the order of letters as their names.

    HTML forbids some of the first; the others would let a text show itself, or what follows it, as something that it is
    not.
    """
    if type(value) is not str:
        return value
    value = re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f]",
        lambda found: "\u2421" if found[0] == "\x7f" else chr(0x2400 + ord(found[0])),
        value,
    )
    return re.sub(r"[\u200e\u200f\u202a-\u202e\u2066-\u2069]", lambda found: f"[U+{ord(found[0]):04X}]", value)
