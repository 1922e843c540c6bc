"""What the number of steps tells before the first: the learning rates, and which steps stay saved.

Learning rates are those of Hugging Face's get_*_schedule_with_warmup. No machine-learning library is imported.
"""

import math

from gemsmith.errors import RecipeError
from gemsmith.recipe.schema import Optimizer, Recipe
from gemsmith.runs.records import Extension
from gemsmith.runs.run import Run
from gemsmith.system.console import open_console


def learning_rate(optimizer: Optimizer, *, update: int, updates: int) -> float:
    """The rate that update number `update` (from 0) of `updates` uses; with warm-up, the first is 0.

    >>> [learning_rate(Optimizer(learning_rate=1.0, warmup_steps=2), update=k, updates=6) for k in (0, 1, 2, 4)]
    [0.0, 0.5, 1.0, 0.5]
    """
    warmup = optimizer.warmup(updates)
    if update < warmup:
        return optimizer.learning_rate * (update / warmup)
    progress = (update - warmup) / max(1, updates - warmup)
    if optimizer.schedule == "cosine":
        return optimizer.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    if optimizer.schedule == "linear":
        return optimizer.learning_rate * max(0.0, 1.0 - progress)
    return optimizer.learning_rate


def say_schedule(recipe: Recipe, steps: int) -> tuple[str, ...]:
    """Prints how long warm-up takes; returns the notices that it printed."""
    optimizer, console = recipe.optimizer, open_console()
    warmup, rate = optimizer.warmup(steps), optimizer.learning_rate
    open_ = optimizer.warmup_steps is None and optimizer.warmup_ratio is None
    why = " (a tenth of the steps, at most 100: optimizer.warmup_steps is not set)" if open_ else ""
    console.print(f"train: {steps:,} steps, warm-up of {warmup:,} to the learning rate {rate:g}{why}")
    notices = schedule_notices(optimizer, steps)
    for notice in notices:
        console.print(notice, style="yellow")
    return notices


def schedule_notices(optimizer: Optimizer, steps: int) -> tuple[str, ...]:
    """A sentence where warm-up takes all steps, so that none gets the recipe's learning rate."""
    warmup = optimizer.warmup(steps)
    if warmup < steps:
        return ()
    highest = learning_rate(optimizer, update=steps - 1, updates=steps)
    return (
        f"Training has {steps:,} step{'s' * (steps != 1)} and warm-up takes {warmup:,}, so no step gets "
        f"optimizer.learning_rate, {optimizer.learning_rate:g}: the last one gets {highest:.2g}. Set "
        "optimizer.warmup_steps lower.",
    )


def describe_extension(optimizer: Optimizer, extension: Extension) -> str:
    """What becomes of the learning rates."""
    done, steps = extension.after, extension.steps
    first, last = (learning_rate(optimizer, update=update, updates=steps) for update in (done, steps - 1))
    return (
        f"{steps:,} steps instead of {extension.planned_steps:,}: the {done:,} done keep their learning rates; from "
        f"step {done + 1:,} on they are those of a {optimizer.schedule} schedule over {steps:,} steps, {first:.3g} to "
        f"{last:.3g}"
    )


def check_export_step(run: Run, steps: int, *, restart: bool = False) -> None:
    """Raises RecipeError where training for so many steps does not leave the one to export."""
    wanted, train = run.recipe.export.step, run.recipe.train
    if wanted is None:
        return
    if train.keep == "best" or train.early_stopping_patience:
        raise RecipeError(
            f"export.step: {wanted} was given, and training decides which steps stay (train.keep, "
            "train.early_stopping_patience); set null, and give it to gemsmith export once training has ended"
        )
    there: list[int] = []
    if not restart and run.checkpoints.is_dir():
        there = [int(entry.name) for entry in run.checkpoints.iterdir() if entry.name.isdecimal()]
    kept = sorted({*there, *range(train.save_steps, steps + 1, train.save_steps), steps})[-train.save_total_limit :]
    if wanted not in kept:
        names = ", ".join([*(["..."] if len(kept) > 8 else []), *map(str, kept[-8:])])
        raise RecipeError(
            f"export.step: {wanted} was given; at the end of {steps} steps, every {train.save_steps}th and the "
            f"last are saved and {names} kept; set one of those or null, or change train.save_steps or "
            f"train.save_total_limit ({train.save_total_limit})"
        )
