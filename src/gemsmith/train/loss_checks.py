"""What losses and gradient norms say: which steps should not count, the same after resuming, and how training went."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemsmith.recipe.schema import Recipe, Train
from gemsmith.runs.records import Evaluation, TrainStep

WINDOW_STEPS = 50
_FEWEST_STEPS = 10
_MOST_SKIPPED_IN_A_ROW = 10


def spike_limit(values: Sequence[float], step: int, factor: float) -> float:
    """The highest loss, or gradient norm, that is no spike at this step, a float32.

    It is factor × the median of 50 steps, up to the last but one before it. `values`: of steps 1, 2, … The step just
    before this one may still be under way when it is needed. Spikes count too, so that a loss that stays high is none
    any more after half a window. Infinite until 10 values are known.
    """
    known = [value for value in values[: max(0, step - 2)][-WINDOW_STEPS:] if math.isfinite(value)]
    return float(np.float32(factor * statistics.median(known))) if len(known) >= _FEWEST_STEPS else math.inf


def reason_to_stop(steps: Sequence[TrainStep], train: Train) -> str | None:
    """Why training ends with the last of these steps, and the key that decides it; None where it goes on."""
    last = steps[-1]
    is_number = math.isfinite(last.loss) and math.isfinite(last.grad_norm)
    if not is_number and train.on_nonfinite == "stop":
        return f"step {last.step} has loss {last.loss} and gradient norm {last.grad_norm} (train.on_nonfinite is stop)"
    for name, value, spike, factor in (
        ("loss", last.loss, last.spike, train.spike_factor),
        ("gradient norm", last.grad_norm, last.grad_norm_spike, train.grad_norm_spike_factor),
    ):
        if spike and train.on_spike == "stop":
            over = f"over {factor:g} × the median before it (train.on_spike is stop)"
            return f"step {last.step} has {name} {value:.4g}, {over}"
    recent = steps[-_MOST_SKIPPED_IN_A_ROW:]
    if len(recent) == _MOST_SKIPPED_IN_A_ROW and all(step.skipped for step in recent):
        return f"the last {len(recent)} steps were all skipped, step {last.step} with loss {last.loss:.4g}"
    return None


def best_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The one of the lowest loss, of several the first; NaN is above all others."""
    return min(evaluations, key=lambda one: (math.isnan(one.loss), one.loss))


def reason_to_end_early(evaluations: Sequence[Evaluation], train: Train, *, after: int, steps: int) -> str | None:
    """Why training ends after the last of these, with patience counted `after` a step; None where it goes on."""
    patience = train.early_stopping_patience
    if patience is None or not evaluations or evaluations[-1].step == steps:
        return None
    best = best_evaluation(evaluations)
    if sum(one.step > max(best.step, after) for one in evaluations) < patience:
        return None
    return (
        f"ended after step {evaluations[-1].step:,} of {steps:,}: no held-out loss below {best.loss:.4f}, that of step "
        f"{best.step:,}, in {patience:,} evaluation{'s' * (patience > 1)} (train.early_stopping_patience)"
    )


# A fall by a smaller share of the loss is hardly one; one by a larger share than the second is, whatever the noise.
_SMALL_SHARE, _LARGE_SHARE = 0.02, 0.1
# Standard errors of a fall, and of a rise, that are more than noise: to say that a loss rose asks for more.
_FALL_SIGMAS, _RISE_SIGMAS = 2.0, 3.0
_FEWEST_STEPS_TO_FALL = 3
# Mean loss of a token below which there is little left to learn; and one to divide by in place of 0.
_LOW_LOSS, _SMALLEST_LOSS = 0.1, 1e-9


@dataclass(frozen=True, kw_only=True)
class Change:
    """The median losses of the first and the last few steps, and the standard error of their difference."""

    first: float
    last: float
    first_steps: int
    last_steps: int
    error: float

    def __str__(self) -> str:
        first = f"median {self.first:.4g} in the first {self.first_steps} steps"
        return f"{first}, {self.last:.4g} in the last {self.last_steps}"

    @property
    def fall(self) -> float:
        """As a share of the first; below 0 where the loss rose."""
        return (self.first - self.last) / max(self.first, _SMALLEST_LOSS)

    @property
    def sigmas(self) -> float:
        """The fall in standard errors."""
        fall = self.first - self.last
        return fall / self.error if self.error > 0 else math.copysign(math.inf, fall)

    @property
    def fell(self) -> bool:
        return self.fall >= _LARGE_SHARE or (self.fall >= _SMALL_SHARE and self.sigmas > _FALL_SIGMAS)

    @property
    def rose(self) -> bool:
        return self.last > _LOW_LOSS and self.fall < -_SMALL_SHARE and self.sigmas < -_RISE_SIGMAS


def loss_plateau_warnings(steps: Sequence[TrainStep], recipe: Recipe) -> tuple[str, ...]:
    """That the loss hardly fell, and a likely reason; empty where it fell, rose, or steps are too few to tell."""
    change = _change(steps)
    if change is None or change.fell or change.rose:
        return ()
    # A loss may fall within the first tenth of the steps, and stay there.
    early = _change(steps, first_steps=_FEWEST_STEPS_TO_FALL)
    if early and early.fell and early.sigmas > _FALL_SIGMAS:
        return ()
    how = "hardly fell" if change.fall < _SMALL_SHARE else "fell no further than its noise"
    how = "did not fall" if change.fall <= 0 else how
    return (f"The loss {how}: {change}; {_reason(steps, recipe, low=change.first < _LOW_LOSS)}.",)


def loss_increase_warnings(steps: Sequence[TrainStep], recipe: Recipe) -> tuple[str, ...]:
    """That the loss clearly rose over the training; empty where it did not, or the steps are too few to tell."""
    change = _change(steps)
    if change is None or not change.rose:
        return ()
    rate = recipe.optimizer.learning_rate
    return (f"The loss rose: {change}; optimizer.learning_rate, {rate:g}, may be too high: do not use this adapter.",)


def grad_norm_warnings(steps: Sequence[TrainStep], recipe: Recipe) -> tuple[str, ...]:
    """That the gradient norm had spikes, and what others lower for them; empty where it had none."""
    spikes, optimizer = [step for step in steps if step.grad_norm_spike], recipe.optimizer
    if not spikes:
        return ()
    worst, factor = max(spikes, key=lambda step: step.grad_norm), recipe.train.grad_norm_spike_factor
    return (
        f"The gradient norm was over {factor:g} × the median before it in {len(spikes):,} of {len(steps):,} steps, "
        f"{worst.grad_norm:.4g} in step {worst.step:,}. If the loss suffers, lower optimizer.learning_rate and "
        f"optimizer.max_grad_norm, which are {optimizer.learning_rate:g} and {optimizer.max_grad_norm or 'null'}: for "
        "the 31B others take 5e-05 and 0.1, with optimizer.beta2 at 0.995.",
    )


def _change(steps: Sequence[TrainStep], *, first_steps: int | None = None) -> Change | None:
    """Of the last tenth of the steps against the first tenth, or the first `first_steps`; None where they are too few.

    The error is that of medians of normal noise, estimated from changes between neighbors, in which no trend shows.
    """
    losses = [step.loss for step in steps if math.isfinite(step.loss) and not step.skipped]
    if len(losses) < 2 * _FEWEST_STEPS_TO_FALL:
        return None
    last_steps = max(_FEWEST_STEPS_TO_FALL, len(losses) // 10)
    first_steps = first_steps or last_steps
    noise = statistics.median(abs(one - other) for one, other in itertools.pairwise(losses)) / (0.6745 * math.sqrt(2))
    return Change(
        first=statistics.median(losses[:first_steps]),
        last=statistics.median(losses[-last_steps:]),
        first_steps=first_steps,
        last_steps=last_steps,
        error=math.sqrt(math.pi / 2 * (1 / first_steps + 1 / last_steps)) * noise,
    )


def _reason(steps: Sequence[TrainStep], recipe: Recipe, *, low: bool) -> str:
    optimizer, total, skipped = recipe.optimizer, len(steps), sum(step.skipped for step in steps)
    rate, warmup, reached = optimizer.learning_rate, optimizer.warmup(total), max(step.learning_rate for step in steps)
    if 2 * skipped > total:
        return f"the updates of {skipped:,} of {total:,} steps were left out"
    if 2 * warmup > total:
        key = "warmup_steps" if optimizer.warmup_ratio is None else "warmup_ratio"
        return (
            f"warm-up took {min(warmup, total):,} of {total:,} steps, and the learning rate reached {reached:.3g} of "
            f"{rate:g}: lower optimizer.{key}, or train for more steps"
        )
    if low:
        return "it was low from the start, so these rows had little left to teach"
    if recipe.train.init_adapter:
        return "training continued from train.init_adapter, which may have learnt from such rows before"
    return f"see whether optimizer.learning_rate, {rate:g}, is too low, or {total:,} steps are too few"
