"""The plan of one machine: what it holds, whether it fits, how long it takes, what it costs, what would make it fit."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from heapq import nlargest
from itertools import accumulate
from typing import Any

from gemsmith.hardware.catalog import Machine, doubts_of
from gemsmith.hardware.model import StepCost, memory_of, on_chips
from gemsmith.hardware.model.memory import memory_breakdown
from gemsmith.hardware.model.step_time import MEASURED_WITHIN, forward_share, step_time
from gemsmith.plan.aot.compile import Limits
from gemsmith.plan.compiled import compile_chosen, compiled_note, with_compiled
from gemsmith.plan.cost import Cost, cheapest_spot, cost_of, on_demand, plan_price, rounded_range
from gemsmith.plan.fix import Fix, find_fix
from gemsmith.plan.mesh import GIB, USABLE_SHARE, Choice, choose_mesh
from gemsmith.recipe.backends import ANSWER_TOKENS
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.plan_records import MachinePlan, PlanFix
from gemsmith.runs.records import Range

RUNTIME, PROCESS = "runtime", "process"
SET_MESH = "set train.mesh to"  # how the note begins that says that training would not choose this mesh by itself
CHECKPOINT_BYTES = 2  # of a number in a checkpoint, whatever train.dtype makes of it


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is planned, whatever the machine."""

    recipe: Recipe
    work_in: Callable[[str], StepCost]  # one step with the base in a dtype
    steps: int
    evaluations: tuple[int, int | None]  # how many, and the batches of each
    tokens: float | None  # real ones of a step
    today: date
    limits: Limits | None  # within which the step is compiled; None: by formula alone

    @property
    def work(self) -> StepCost:
        return self.work_in(self.recipe.train.dtype)


def plan_machine(asked: Asked, machine: Machine) -> MachinePlan:
    """The plan, and where the machine does not fit the smallest change found with which it does."""
    recipe = asked.recipe
    work = on_chips(asked.work, machine.chip.kind, recipe)
    choice = choose_mesh(work, machine, recipe)
    limits = asked.limits
    compiled = None if limits is None else compile_chosen(recipe, choice, machine, work.images, limits)
    if compiled is not None:
        choice = with_compiled(choice, compiled, machine)
    fits = not choice.problems
    cost = _cost(asked, choice, machine, recipe)
    fix = None if fits else find_fix(recipe, machine, asked.work_in)
    held, chip = memory_breakdown(replace(work, remat=choice.remat), choice.memory), machine.chip
    price = on_demand(machine)
    process = {PROCESS: choice.hbm_bytes_per_chip - sum(held.values())} if chip.kind == "cpu" else {}
    # The runtime's is what is set aside, so that what fits adds up to no more than there is.
    runtime = {RUNTIME: round((1 - USABLE_SHARE) * chip.hbm_bytes)}
    parts = {name: size * chip.devices for name, size in held.items()} | process | runtime
    largest, exceeded_by = _largest_parts(parts, machine)
    spans = ", ".join(f"{name} {low:.0f} to {high:.0f} s" for name, (low, high) in cost.startup_s.items())
    return MachinePlan(
        name=machine.name,
        chips=machine.chips,
        fits=fits,
        hbm_bytes_per_chip=choice.hbm_bytes_per_chip,
        hbm_limit_bytes_per_chip=machine.chip.hbm_bytes,
        parts=parts,
        exceeded_by=None if fits else exceeded_by,
        step_s=rounded_range((choice.time.low_s, choice.time.high_s)),
        measured=_measured(machine),
        **(vars(cost) if fits else {"startup_s": cost.startup_s, "hours": None, "usd": None}),
        price_doubts=() if price is None else doubts_of(price, asked.today),
        price=plan_price(price),
        price_spot=plan_price(cheapest_spot(machine), spot=True),
        mesh=choice.mesh.model_dump(),
        compiled=compiled,
        fix=None if fix is None else _fixed_plan(asked, fix, machine),
        notes=(
            *choice.problems,
            *([] if fits else [largest]),
            *([] if compiled is None else [compiled_note(compiled)]),
            *_training_notes(asked, work, choice, machine, cost),
            *([f"start, estimated: {spans}"] if fits else []),
            _price_note(machine, cost.usd_spot if fits else None, asked.today),
            _speed_note(machine),
        ),
    )


def _cost(asked: Asked, choice: Choice, machine: Machine, recipe: Recipe) -> Cost:
    """Of the recipe or a fix of it: with fewer rows a step there are more steps of fewer tokens."""
    train = recipe.train
    share = train.global_batch_size / asked.recipe.train.global_batch_size
    steps = asked.steps if train.max_steps is not None else math.ceil(asked.steps / share)
    return cost_of(
        choice.time,
        machine,
        train,
        steps=steps,
        tokens=None if asked.tokens is None else asked.tokens * share,
        checkpoint_bytes=CHECKPOINT_BYTES * asked.work.parameters,
        evaluated=_evaluated(asked, choice, machine, recipe),
    )


def _evaluated(asked: Asked, choice: Choice, machine: Machine, recipe: Recipe) -> Range:
    """What all evaluations take, in steps: a forward pass for each batch, and one for each token of sample answers.

    An answer has a token at least, ANSWER_TOKENS at most; its rows are reckoned as long as those of a step.
    """
    (evaluations, batches), parts = asked.evaluations, choice.mesh.replica * choice.mesh.fsdp
    if not batches:
        return 0, 0
    held_out, prompts = batches * asked.work.rows, -(-recipe.train.sample_answers // parts) * parts
    work = replace(on_chips(asked.work, machine.chip.kind, recipe), remat=choice.remat)
    each = evaluations * forward_share(work) / recipe.train.global_batch_size
    return each * (held_out + prompts), each * (held_out + ANSWER_TOKENS * prompts)


def _fixed_plan(asked: Asked, fix: Fix, machine: Machine) -> PlanFix:
    cost = _cost(asked, fix.choice, machine, fix.recipe)
    return PlanFix(
        changes=fix.changes,
        mesh=fix.choice.mesh.model_dump(),
        hbm_bytes_per_chip=fix.choice.hbm_bytes_per_chip,
        step_s=rounded_range((fix.choice.time.low_s, fix.choice.time.high_s)),
        hours=cost.hours,
        usd=cost.usd,
        usd_per_million_tokens=cost.usd_per_million_tokens,
    )


def _largest_parts(parts: Mapping[str, int], machine: Machine) -> tuple[str, str | None]:
    """A note of the three largest, and which part, in their order, no longer fits."""
    held = {name: size for name, size in parts.items() if name != RUNTIME}
    limit = machine.chip.hbm_bytes - parts[RUNTIME]
    too_much = (name for name, total in zip(held, accumulate(held.values()), strict=True) if total > limit)
    exceeded_by = next(too_much, None)
    largest = ", ".join(f"{name} {held[name] / GIB:.1f}" for name in nlargest(3, held, key=held.__getitem__))
    also = f"; memory is full at {exceeded_by}" if exceeded_by else ""
    return f"the largest parts, in GiB a chip: {largest}{also}", exceeded_by


def describe_changes(changes: Mapping[str, Any]) -> str:
    """The keys and their values as one writes them, axes of the mesh that split nothing left out."""
    words = []
    for key, value in changes.items():
        if isinstance(value, Mapping):
            axes = (f"{axis}: {size}" for axis, size in value.items() if size > 1 or axis == "fsdp")
            words.append(f"{key}: {{{', '.join(axes)}}}")
        else:
            words.append(f"{key}: {value}")
    return ", ".join(words)


def _training_notes(asked: Asked, work: StepCost, choice: Choice, machine: Machine, cost: Cost) -> Iterator[str]:
    """What training does there that the recipe does not say."""
    recipe, (evaluations, batches) = asked.recipe, asked.evaluations
    if recipe.train.early_stopping_patience:
        yield "time and dollars are of all steps; train.early_stopping_patience may end it earlier"
    if batches and not choice.problems:
        answers = recipe.train.sample_answers
        told = f", and {answers} answers of up to {ANSWER_TOKENS} tokens" if answers else ""
        low_s, high_s = cost.evaluations_s
        yield f"evaluations, estimated: {evaluations:,} of {batches:,} batches{told}: {low_s:.3g} to {high_s:.3g} s"
    elif evaluations:
        yield "the time of train.eval_steps is not in it: each evaluation runs all rows of data.eval forward"
    if work.one_by_one and work.rows > 1:
        yield "rows are trained one after the other there, with or without train.gradient_accumulation_steps"
    if work.images is not None and not choice.problems:
        # What they cost more than as long rows of text.
        seen = replace(work, remat=choice.remat)
        text = replace(seen, images=None)
        one, other = (step_time(each, machine, choice.mesh) for each in (seen, text))
        held = machine.chip.devices * (choice.memory.total - memory_of(text, choice.mesh).total)
        layers = work.blocked_sliding_layers
        blocks = f" and {layers} sliding layers without the kernel" if layers else ""
        seconds = f"{max(0, one.low_s - other.low_s):.2g} to {one.high_s - other.high_s:.2g} s of the step"
        yield f"images, by formula: {seconds}, for embedding them{blocks}; {held / GIB:.1f} GiB a chip of the peak"
    if recipe.train.remat == "auto" and not choice.problems:
        saved = {"none": "everything", "layer": "only the layers' inputs"}.get(str(choice.remat))
        yield f"train.remat auto: {saved or ', '.join(choice.remat)} saved for the backward pass"
    if recipe.train.mesh == "auto" and choice.mesh.tp > 1 and not choice.problems:
        # Training's own choice, which never takes tp, is slower or does not fit.
        sizes = ", ".join(f"{axis}: {size}" for axis, size in choice.mesh.model_dump().items() if size > 1)
        yield f"{SET_MESH} {{{sizes}}} to get this; auto trains with tp 1: slower, or too large"
    if machine.slices > 1 and machine.chip.dcn_bytes_per_s:
        host = 8 * machine.chip.dcn_bytes_per_s * machine.chips / machine.hosts / 1e9
        yield (
            f"{machine.slices} slices, each with whole weights; the adapters' gradients between them, by formula: "
            f"{1000 * choice.time.dcn_s:,.3g} ms a step at {host:,.4g} Gbit/s a host, the catalog's dcn_bytes_per_s"
        )


def _price_note(machine: Machine, usd_spot: Range | None, today: date) -> str:
    """What the dollars were reckoned with, and the cheapest spot price, whichever region has it."""
    spot = cheapest_spot(machine)
    also = f"; spot from {spot.usd_per_hour_spot:.2f} in {spot.region}" if spot else ""
    also += f": {usd_spot[0]:,.4g} to {usd_spot[1]:,.4g} USD" if usd_spot else ""
    price = on_demand(machine)
    if price is None:
        return f"the catalog has no on-demand price{also}; add one in hardware.catalog"
    return (
        f"{price.usd_per_hour:.2f} USD/h on demand, {price.provider} {price.region} ({price.source}, "
        f"{', '.join((price.date, *doubts_of(price, today)))}){also}"
    )


def _measured(machine: Machine) -> str | None:
    return f"{machine.measured_source}, {machine.measured_date}" if machine.measured_low is not None else None


def _speed_note(machine: Machine) -> str:
    chip = machine.chip
    peak = (
        f"{chip.flops_per_s / 1e12:,.3g} TFLOP/s a chip ({chip.source}, "
        f"{chip.date}{'' if chip.checked else ', not checked'})"
    )
    if chip.kind == "cpu":
        peak += "; memory has Python, libraries and compilation in it, as benchmarks/records/cpu_memory.json measured"
    low, high, source = chip.efficiency_low, chip.efficiency_high, chip.efficiency_source
    if machine.measured_low is not None and machine.measured_high is not None:
        low, high = machine.measured_low, machine.measured_high
        source = f"measured there, and {100 * (MEASURED_WITHIN - 1):.0f} % each way: {_measured(machine)}"
    return f"matmuls at {100 * low:.3g} to {100 * high:.3g} % of {peak}; {source}"
