"""Learning rates, as Hugging Face's get_*_schedule_with_warmup give them. No machine-learning library is imported."""

import math

from gemsmith.recipe import Optimizer


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
