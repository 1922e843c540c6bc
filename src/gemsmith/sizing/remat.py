"""What `train.remat: auto` saves for the backward pass: as much as fits, first what saves most for its bytes."""

from dataclasses import replace

from gemsmith.execution import Remat
from gemsmith.recipe import Mesh
from gemsmith.sizing.memory import memory_of
from gemsmith.sizing.work import Work

# A projection recomputed costs as many FLOPs a byte of its result as it has inputs: of down the hidden units, of o
# the heads' numbers, of the others the model's width. What A gives is R wide, so it costs next to nothing to save.
ORDER = ("lora", "down", "o", "attended", "v", "k", "q", "gate", "up")
ROOM = 0.8
"""Of the chip's memory: the formula knows of no fragments."""


def choose_remat(work: Work, mesh: Mesh, *, device_bytes: float) -> Remat:
    """The names that fit the device's memory beside all else, `layer` where none does.

    Never `none`: what no name saves costs more to write and read than to compute. On CPU it takes 1.1 to 1.2 times as
    long.
    """
    saved: tuple[str, ...] = ()
    for name in (name for name in ORDER if name not in work.offload):
        if _fits(replace(work, remat=(*saved, name)), mesh, device_bytes):
            saved = (*saved, name)
    return saved or "layer"


def _fits(work: Work, mesh: Mesh, device_bytes: float) -> bool:
    return memory_of(work, mesh).total <= ROOM * device_bytes
