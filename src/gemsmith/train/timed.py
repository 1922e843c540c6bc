"""Which steps of a training say how fast it is, and what the plan had said of them."""

import statistics
from collections.abc import Sequence

from gemsmith.errors import GemsmithError
from gemsmith.hardware import load_catalogue, machines_with
from gemsmith.plan_records import PlanRecord
from gemsmith.records import AgainstPlan, TrainStep
from gemsmith.run import Run, is_complete, read_record


def timed_steps(steps: Sequence[TrainStep], resumed_at: Sequence[int]) -> list[TrainStep]:
    """All but the first of each attempt, which warms up."""
    warming = {1, *(step + 1 for step in resumed_at)}
    return [step for step in steps if step.step not in warming]


def against_plan(run: Run, accelerators: Sequence[str], steps: Sequence[TrainStep]) -> AgainstPlan | None:
    """What plan.json says of a step on this machine, and what these steps took.

    None without steps, or a plan of this recipe that has the machine.
    """
    if not steps or not _is_planned(run):
        return None
    names = {machine.name for machine in machines_with(load_catalogue(run.recipe.hardware.catalogue), accelerators)}
    for machine in read_record(run, PlanRecord).machines:
        if machine.name in names:
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
