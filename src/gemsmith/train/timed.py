"""Where a training ran, its seconds, which of its steps say how fast it is, and what the plan had said of them."""

import statistics
from collections.abc import Sequence

from gemsmith.errors import GemsmithError
from gemsmith.hardware import load_catalogue, machines_with
from gemsmith.plan_records import PlanRecord
from gemsmith.records import AgainstPlan, TrainRecord, TrainStep
from gemsmith.run import Run, is_complete, read_record


def timed_steps(steps: Sequence[TrainStep], resumed_at: Sequence[int]) -> list[TrainStep]:
    """All but the first of each attempt, which warms up."""
    warming = {1, *(step + 1 for step in resumed_at)}
    return [step for step in steps if step.step not in warming]


def trained_s(train: TrainRecord) -> float:
    """Seconds of training: what is paid for, and the only ones that dollars are made of.

    The last start as a whole, from reading the checkpoint to the record, and the steps that earlier starts had done; at
    least compiling and all steps, which is more where the last start found nothing left to train. No record has what
    earlier starts took beside their steps, nor steps that were lost with them.
    """
    before = sum(step.step_s for step in train.steps if step.step <= max(train.resumed_at, default=0))
    return max(train.origin.duration_s + before, train.compile_s + sum(step.step_s for step in train.steps))


def machine_of(run: Run, accelerators: Sequence[str]) -> str | None:
    """The machine of the catalog that has these devices, as TrainRecord.machine says it."""
    try:
        catalogue = load_catalogue(run.recipe.hardware.catalogue)
    except GemsmithError:  # gone since the plan: training does not need it
        return None
    found = machines_with(catalogue, accelerators, run.recipe.hardware.machines)
    return found[0].name if len(found) == 1 else None


def against_plan(run: Run, trained_on: str | None, steps: Sequence[TrainStep]) -> AgainstPlan | None:
    """What plan.json says of a step on this machine, and what these steps took.

    None without steps, or a plan of this recipe that has the machine.
    """
    if not steps or not _is_planned(run):
        return None
    for machine in read_record(run, PlanRecord).machines:
        if machine.name == trained_on:
            seen = statistics.median(step.step_s for step in steps)
            return AgainstPlan(machine=machine.name, planned_step_s=machine.step_s, step_s=seen, steps=len(steps))
    return None


def describe(found: AgainstPlan) -> str:
    """The comparison in a line."""
    low, high = found.planned_step_s
    if found.step_s > high:
        verdict = f"{found.step_s / high:.2g} times the most"
    elif found.step_s < low:
        verdict = f"{low / found.step_s:.2g} times faster than the least"
    else:
        verdict = "within it"
    return (
        f"a step takes {found.step_s:.3g} s (median of {found.steps:,}); the plan said {low:.3g} to {high:.3g} s for "
        f"{found.machine}: {verdict}"
    )


def _is_planned(run: Run) -> bool:
    try:
        return is_complete(run, "plan")
    except GemsmithError:  # of another version, or damaged: training does not need it
        return False
