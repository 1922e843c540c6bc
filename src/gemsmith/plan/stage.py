"""The plan stage: memory, time and dollars of the recipe on its machines, on others, and over values of its keys."""

import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from gemsmith.arch import VARIANTS
from gemsmith.errors import InputError
from gemsmith.hardware import Catalog, Machine, find_machine, load_catalog
from gemsmith.hardware.catalog import own_catalog, own_files
from gemsmith.hardware.model import StepCost, step_cost
from gemsmith.hardware.model import step_time as time
from gemsmith.plan.aot.compile import Limits
from gemsmith.plan.compiled import check_compiles
from gemsmith.plan.cost import LOAD_BYTES_PER_S, PREEMPTION_HOURS
from gemsmith.plan.counts import PRICED_STEPS, count_evaluations, count_images, count_real_tokens, count_steps
from gemsmith.plan.machine import Asked, plan_machine
from gemsmith.plan.serving import plan_serving
from gemsmith.recipe.backends import LOGIT_TOKENS, OTHER_QUERY_BLOCK, QUERY_BLOCKS
from gemsmith.recipe.load import build_recipe, dump_recipe, with_values
from gemsmith.recipe.schema import Recipe, ResolvedValue
from gemsmith.runs.plan_records import MachinePlan, PlanRecord
from gemsmith.runs.records import DataRecord, Range
from gemsmith.runs.resolve import recipe_variant, resolve_file
from gemsmith.runs.run import Run, is_up_to_date, make_provenance, read_record, start_clock, write_record
from gemsmith.system.files import sha256_file, write_text

ALL = "all"
Sort = Literal["usd", "hours"]
MOST_SWEPT = 200  # plans of one sweep: some seconds


def assumptions_of(work: StepCost, recipe: Recipe) -> tuple[str, ...]:
    """What the numbers of a plan rest on, a sentence each."""
    at_once = "all at once" if work.micro_batches == 1 else f"in {work.micro_batches} micro-batches"
    remat = "layer" if (recipe.train.backend, recipe.train.remat) == ("trl", "auto") else recipe.train.remat
    recomputed = {
        "auto": "of every layer as much is saved for the backward pass as fits",
        "none": "every activation is saved",
        "layer": "every layer is recomputed in the backward pass",
    }.get(str(remat), f"layers are recomputed in the backward pass, but for {', '.join(remat)}")
    trained = "weights" if work.trained_weights else "base weights and adapters"
    sentences = [
        "Everything here is estimated by formula; nothing was measured on these machines, unless a machine says so.",
        f"{work.rows} row{'s' * (work.rows != 1)} of {work.length:,} tokens a step, {at_once}; {recomputed}.",
        f"Attention is the splash kernel on TPU; elsewhere blocks of {OTHER_QUERY_BLOCK} queries "
        f"({QUERY_BLOCKS['cpu']} on CPU) are compared with the keys in their reach.",
        "Documents packed into a row are reckoned as one document of its length, which is an upper bound.",
        f"Each device holds the logits of {LOGIT_TOKENS:,} tokens at once.",
        f"Each replica, so each slice, has all {trained}, split over its devices.",
        f"{trained.rpartition(' ')[2].capitalize()}, their gradients and moments are float32.",
        "Low: traffic between chips hidden and matmuls at their best; high: none hidden and matmuls at their worst.",
        f"Attention reaches {100 * time.ATTENTION_SHARE:.0f} % of the share of the peak that matmuls reach.",
        f"Hours have one start in them: the checkpoint read at {LOAD_BYTES_PER_S[1] / 1e9:g} to "
        f"{LOAD_BYTES_PER_S[0] / 1e9:g} GB/s (assumed), then compilation (by train.backend tunix as long as the first "
        "step of the 31B in arXiv 2605.25645); checkpoints and waiting for a machine are left out.",
        f"Spot: never taken away, to once in {PREEMPTION_HOURS:g} hours (assumed), each time losing a start and half "
        f"of the {recipe.train.save_steps} steps between checkpoints.",
        "Starting a kernel costs nothing here, so the steps of tiny models are longer than said.",
    ]
    if recipe.train.backend == "trl":
        sentences.append("train.backend trl is taken to need what the JAX backend needs with the same attention.")
    if work.dtype_bytes == 4:
        tpu, gpu = (round(1 / time.FLOAT32_SHARE[kind]) for kind in ("tpu", "gpu"))
        sentences.append(f"float32 matmuls run at 1/{tpu} of a TPU's bfloat16 peak, and at 1/{gpu} of a GPU's.")
    if work.dequantizes:
        sentences.append("A quantized base is dequantized a layer at a time, in every pass.")
    if work.variant.experts:
        sentences.append("Experts compute only the tokens sent to them, evenly spread.")
    return tuple(sentences)


def plan(run: Run, sort: Sort | None = None, limits: Limits | None = None) -> PlanRecord:
    """The run's plan, also written to plan.json. Uses the data stage's record where there is one."""
    return write_record(run, plan_run(run, sort=sort, limits=limits))


def plan_run(
    run: Run, machine: str | None = None, sort: Sort | None = None, limits: Limits | None = None, *, alone: bool = False
) -> PlanRecord:
    """The run's plan, for `machine` where that is given: names with a comma between them, or `all`.

    Nothing is written, and `alone` no record is read. Ranked by dollars or hours where `sort` is given; else machines
    come as they were named. With limits the step is compiled within them for each TPU.
    """
    clock, recipe = start_clock(), run.recipe
    data = None if alone or not is_up_to_date(run, "data") else read_record(run, DataRecord)
    sources = {} if data is None else {"data.json": sha256_file(run.record_file("data"))}
    catalog = load_catalog(recipe.hardware.catalog)
    for file in own_files(recipe.hardware.catalog):
        sources["own catalog" if file == own_catalog() else "catalog"] = sha256_file(file)
    machines = _find_machines(recipe, catalog, machine)
    if limits is not None:
        check_compiles(recipe, machines)
    variant = recipe_variant(recipe)
    (steps, why), (tokens, told) = count_steps(recipe, data), count_real_tokens(recipe, data)
    counted = count_images(recipe, variant, data)

    @functools.cache
    def work_in(dtype: str) -> StepCost:
        return step_cost(with_values(recipe, [("train.dtype", dtype)]), variant, images=counted.images)

    asked = Asked(
        recipe=recipe,
        work_in=work_in,
        steps=steps or PRICED_STEPS,
        evaluations=count_evaluations(recipe, data, steps or PRICED_STEPS),
        tokens=tokens,
        today=datetime.now(UTC).date(),
        limits=limits,
    )
    work, images = asked.work, counted.in_prompt
    record = PlanRecord(
        provenance=make_provenance(run, "plan", clock, sources=sources),
        model=variant.name,
        parameters=work.parameters,
        trained_parameters=work.trained_parameters,
        steps=steps,
        priced_steps=asked.steps,
        tokens_per_step=work.tokens,
        real_tokens_per_step=tokens,
        machines=tuple(plan_machine(asked, machine) for machine in machines),
        serving=tuple(row for machine in machines for row in plan_serving(recipe, variant, machine, images)),
        assumptions=(why, told, *counted.reasons, *assumptions_of(work, recipe)),
    )
    return record if sort is None else ranked(record, sort)


def plan_only(
    recipe: Recipe, machine: str | None = None, sort: Sort | None = None, limits: Limits | None = None
) -> PlanRecord:
    """The plan of a resolved recipe that has no run directory. Nothing is written."""
    return plan_run(Run(path=Path(), recipe=recipe), machine, sort, limits, alone=True)


def ranked(record: PlanRecord, sort: Sort) -> PlanRecord:
    """The plan with machines that fit first, then what a change makes fit; the lowest upper ends ahead."""

    def place(machine: MachinePlan) -> tuple[bool, bool, float]:
        planned = machine if machine.fits else machine.fix
        found = getattr(planned, sort, None)
        if planned is None or found is None:
            return not machine.fits, True, (planned.hours or (0, 0))[1] if planned else float("inf")
        return not machine.fits, False, found[1]

    return record.model_copy(update={"machines": tuple(sorted(record.machines, key=place))})


def write_fix(recipe: Recipe, record: PlanRecord, path: Path) -> None:
    """Writes the recipe with what makes it fit the plan's only machine. Raises InputError where that is nothing."""
    check_fix(path)
    if len(record.machines) != 1:
        raise InputError(f"--fix {path}: {len(record.machines)} machines are planned; name one with --machine")
    (machine,) = record.machines
    if machine.fits:
        raise InputError(f"--fix {path}: the recipe fits {machine.name} as it is; nothing was written")
    if machine.fix is None:
        raise InputError(
            f"--fix {path}: no change was found that makes the recipe fit {machine.name}; try a larger one"
        )
    changes = {**machine.fix.changes, "hardware.machines": [machine.name]}
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    fixed = build_recipe(recipe.model_dump(mode="json"), overrides)
    path.parent.mkdir(parents=True, exist_ok=True)
    reason = f"gemsmith plan --fix: to fit {machine.name}"
    write_text(path, dump_recipe(fixed, [ResolvedValue(key, value, reason) for key, value in changes.items()]))


def check_fix(path: Path) -> None:
    """Raises InputError where a recipe must not be written over what is there."""
    if path.exists():
        raise InputError(f"--fix {path}: already exists; name another file, or delete it")


def _find_machines(recipe: Recipe, catalog: Catalog, machine: str | None) -> list[Machine]:
    """The machines to plan for, each once, in the order of their names."""
    if machine is None:
        found = [find_machine(catalog, name) for name in recipe.hardware.machines]
    elif machine.strip().lower() == ALL:
        found = list(catalog.machines.values())
    elif names := [name.strip() for name in machine.split(",") if name.strip()]:
        found = [find_machine(catalog, name, "--machine") for name in names]
    else:
        raise InputError(f"--machine {machine!r}: names no machine; give {ALL}, or names with a comma between them")
    return list({machine.name: machine for machine in found}.values())


@dataclass(frozen=True, kw_only=True)
class SweptPlan:
    """A machine under one choice of the values; estimated."""

    values: tuple[str, ...]
    machine: MachinePlan
    tokens_per_s: Range  # positions of full rows, low and high
    usd_per_million: Range | None
    """Of those positions, at the price on demand; None where it does not fit or has no price."""


def read_axis(text: str) -> tuple[str, list[str]]:
    """A key and its values: KEY=A,B, KEY=4096..131072 by doubling, or model=all.

    >>> read_axis("data.max_length=4096..16384")
    ('data.max_length', ['4096', '8192', '16384'])
    """
    key, mark, given = text.partition("=")
    key, given = key.strip(), given.strip()
    low, dots, high = given.partition("..")
    if key == "model" and given == "all":
        return key, [name for name in VARIANTS if not name.startswith("tiny-")]
    if dots and low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high):
        return key, [str(int(low) << doubled) for doubled in range((int(high) // int(low)).bit_length())]
    if not mark or not key or dots or not given:
        raise InputError(f"--sweep {text}: must be KEY=A,B, KEY=LOW..HIGH, which doubles LOW up to HIGH, or model=all")
    return key, [value.strip() for value in given.split(",")]


def sweep(
    source: Path, axes: Sequence[tuple[str, Sequence[str]]], overrides: Sequence[str] = (), machine: str | None = None
) -> Iterator[SweptPlan]:
    """The recipe's plan for each combination of the values, machine by machine. Raises RecipeError as a plan does."""
    if (count := math.prod(len(values) for _, values in axes)) > MOST_SWEPT:
        raise InputError(f"--sweep: {count} combinations; at most {MOST_SWEPT} are planned at once")
    for values in itertools.product(*(values for _, values in axes)):
        choice = dict(zip((key for key, _ in axes), values, strict=True))
        chosen = [f"{key}={value}" for key, value in choice.items()]
        if (variant := VARIANTS.get(choice.get("model", ""))) and variant.hub_ids:
            # The recipe's own is another model's.
            chosen.append(f"checkpoint={variant.hub_ids[0]}")
        record = plan_only(resolve_file(source, [*overrides, *chosen])[0], machine)
        for each in record.machines:
            low_s, high_s = each.step_s
            usd = None
            if each.fits and each.price is not None:
                second = each.price.usd_per_hour / 3600 * 1e6 / record.tokens_per_step
                usd = (second * low_s, second * high_s)
            rates = (record.tokens_per_step / high_s, record.tokens_per_step / low_s)
            yield SweptPlan(values=values, machine=each, tokens_per_s=rates, usd_per_million=usd)
