"""Steps that should not count: their loss is a spike, or NaN or infinite.

Which ones they are follows from the losses, so resuming changes nothing.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from gemsmith.recipe import Train
from gemsmith.records import TrainStep

WINDOW_STEPS = 50
_FEWEST_STEPS = 10
_MOST_SKIPPED_IN_A_ROW = 10


def spike_limit(losses: Sequence[float], step: int, factor: float) -> float:
    """The highest loss that is no spike at this step, a float32.

    It is factor × the median of 50 steps, up to the last but one before it. `losses`: of steps 1, 2, … The step just
    before this one may still be under way when it is needed. Spikes count too, so that a loss that stays high is none
    any more after half a window. Infinite until 10 losses are known.
    """
    known = [loss for loss in losses[: max(0, step - 2)][-WINDOW_STEPS:] if math.isfinite(loss)]
    return float(np.float32(factor * statistics.median(known))) if len(known) >= _FEWEST_STEPS else math.inf


def reason_to_stop(steps: Sequence[TrainStep], train: Train) -> str | None:
    """Why training ends with the last of these steps, and the key that decides it; None where it goes on."""
    last = steps[-1]
    is_number = math.isfinite(last.loss) and math.isfinite(last.grad_norm)
    if not is_number and train.on_nonfinite == "stop":
        return f"step {last.step} has loss {last.loss} and gradient norm {last.grad_norm} (train.on_nonfinite is stop)"
    if last.spike and train.on_spike == "stop":
        return (
            f"step {last.step} has loss {last.loss:.4g}, over {train.spike_factor:g} × the median before it "
            "(train.on_spike is stop)"
        )
    recent = steps[-_MOST_SKIPPED_IN_A_ROW:]
    if len(recent) == _MOST_SKIPPED_IN_A_ROW and all(step.skipped for step in recent):
        return f"the last {len(recent)} steps were all skipped, step {last.step} with loss {last.loss:.4g}"
    return None
