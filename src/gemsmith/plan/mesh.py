"""Which mesh a machine gets: every one that the model allows is tried, and of those that fit the fastest is taken."""

from dataclasses import dataclass
from typing import Literal

from gemsmith.hardware import Machine
from gemsmith.plan.memory import Memory, memory_of
from gemsmith.plan.time import StepTime, step_time
from gemsmith.plan.work import Work
from gemsmith.recipe import Mesh
from gemsmith.zoo import Variant

USABLE_SHARE = 0.95
"""Of a chip's memory: allocators lose some to fragments, and the formula knows nothing finer."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A mesh on a machine, what it needs, and why it cannot be used, if it cannot."""

    mesh: Mesh
    memory: Memory
    time: StepTime
    hbm_bytes_per_chip: int
    problems: tuple[str, ...]


def allowed_tp(variant: Variant) -> list[int]:
    """Values of tp that divide the kv heads of every layer.

    31B: 4 global kv heads, so 1, 2 and 4. Its 32 heads and 16 local kv heads would allow 8.
    """
    heads = [variant.kv_heads_of(layer) for layer in range(variant.layers)]
    return [tp for tp in range(1, min(heads) + 1) if all(count % tp == 0 for count in heads)]


def choose_mesh(work: Work, machine: Machine, wanted: Mesh | Literal["auto"]) -> Choice:
    """The wanted mesh, or for `auto` the fastest of those that fit; where none fits, the one that comes closest."""
    if wanted != "auto":
        return _weigh(work, machine, wanted)
    devices = machine.devices
    meshes = [Mesh(fsdp=devices // tp, tp=tp) for tp in allowed_tp(work.variant) if devices % tp == 0]
    choices = [_weigh(work, machine, mesh) for mesh in meshes]
    usable = [choice for choice in choices if not choice.problems]
    if usable:
        return min(usable, key=lambda choice: choice.time.low_s + choice.time.high_s)
    return min(choices, key=lambda choice: (len(choice.problems), choice.hbm_bytes_per_chip))


def _weigh(work: Work, machine: Machine, mesh: Mesh) -> Choice:
    memory, chip = memory_of(work, mesh), machine.chip
    hbm_bytes = memory.total * chip.devices
    problems = []
    if mesh.fsdp * mesh.tp != machine.devices:
        problems.append(
            f"train.mesh is {mesh.fsdp * mesh.tp} devices (fsdp {mesh.fsdp} x tp {mesh.tp}); this machine has {machine.devices}"
        )
    allowed = allowed_tp(work.variant)
    if mesh.tp not in allowed:
        problems.append(f"train.mesh.tp is {mesh.tp}; {work.variant.name}'s kv heads allow {', '.join(map(str, allowed))}")
    if work.rows % mesh.fsdp:
        problems.append(f"train.rows_per_step is {work.rows}; fsdp {mesh.fsdp} needs a multiple of it")
    if hbm_bytes > USABLE_SHARE * chip.hbm_bytes:
        problems.append(
            f"needs {hbm_bytes / GIB:.1f} GiB a chip of {chip.hbm_bytes / GIB:.1f}, of which {100 * USABLE_SHARE:.0f} % can be used; "
            "a larger machine, fewer train.rows_per_step or train.remat: layer need less"
        )
    return Choice(mesh=mesh, memory=memory, time=step_time(work, machine, mesh), hbm_bytes_per_chip=hbm_bytes, problems=tuple(problems))
