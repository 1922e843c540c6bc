"""Which mesh a machine gets: every one that the model allows is tried, and of those that fit the fastest is taken."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gemsmith.errors import RecipeError
from gemsmith.hardware import Machine
from gemsmith.hardware.model import StepCost, choose_remat, memory_of
from gemsmith.hardware.model.limits import allowed_tp, auto_mesh, check_mesh, trl_mesh
from gemsmith.hardware.model.memory import Memory, held_on_cpu
from gemsmith.hardware.model.step_time import StepTime, step_time
from gemsmith.recipe.backends import BACKENDS, Remat
from gemsmith.recipe.schema import Mesh, Recipe

USABLE_SHARE = 0.95  # of a chip's memory: allocators lose some to fragments, and the formula knows nothing finer
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A mesh on a machine, what it needs, and why it cannot be used, if it cannot."""

    mesh: Mesh
    remat: Remat
    memory: Memory
    time: StepTime
    hbm_bytes_per_chip: int
    problems: tuple[str, ...]


def choose_mesh(work: StepCost, machine: Machine, recipe: Recipe) -> Choice:
    """The recipe's mesh, or for `auto` the fastest of those that fit; where none fits, the one that comes closest.

    Where train.remat is `auto`, each with what fits it. The backend trl has neither sequence nor tp, and recomputes
    whole layers. `work` is the recipe's on chips of the machine.
    """
    wanted, slices = recipe.train.mesh, machine.slices
    if wanted != "auto":
        return _weigh(work, machine, wanted, recipe)
    if recipe.train.backend == "trl":
        return _weigh(work, machine, Mesh(replica=slices, fsdp=machine.devices // slices), recipe)
    choices = [
        _weigh(work, machine, auto_mesh(recipe, machine.devices, slices, tp=tp), recipe)
        for tp in allowed_tp(work.variant)
        if machine.devices // slices % tp == 0
    ]
    usable = [choice for choice in choices if not choice.problems]
    if usable:
        return min(usable, key=lambda choice: choice.time.low_s + choice.time.high_s)
    return min(choices, key=lambda choice: (len(choice.problems), choice.hbm_bytes_per_chip))


def _faults(work: StepCost, machine: Machine, mesh: Mesh, recipe: Recipe) -> Iterator[str]:
    """Why the recipe cannot be laid out on the machine's devices, however large they are."""
    name, sizes = recipe.train.backend, mesh.model_dump()
    if machine.chip.kind not in (chips := BACKENDS[name].chips):
        yield f"train.backend {name} runs on {' and '.join(kind.upper() for kind in chips)}; set it to tunix"
    if (count := math.prod(sizes.values())) != machine.devices:
        given = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        yield f"train.mesh is {count} devices ({given}); this machine has {machine.devices}"
    if mesh.replica % machine.slices:
        yield f"train.mesh.replica is {mesh.replica}; for {machine.slices} slices it is a multiple of {machine.slices}"
    try:
        if name == "trl":
            trl_mesh(recipe, mesh.replica * mesh.fsdp)
        else:
            check_mesh(recipe, work.variant, sizes)
    except RecipeError as error:
        yield str(error)


def _weigh(work: StepCost, machine: Machine, mesh: Mesh, recipe: Recipe) -> Choice:
    chip, backend = machine.chip, recipe.train.backend
    remat: Remat | Literal["auto"] = recipe.train.remat
    if remat == "auto":
        remat = "layer" if backend == "trl" else choose_remat(work, mesh, device_bytes=chip.hbm_bytes / chip.devices)
    work = replace(work, remat=remat)
    memory = memory_of(work, mesh)
    hbm_bytes = memory.total * chip.devices if chip.kind != "cpu" else held_on_cpu(work, memory.total, backend)
    problems = list(_faults(work, machine, mesh, recipe))
    if hbm_bytes > USABLE_SHARE * chip.hbm_bytes:
        lower = "" if remat == "layer" else ", train.remat: layer"
        problems.append(
            f"needs {hbm_bytes / GIB:.1f} GiB a chip of {chip.hbm_bytes / GIB:.1f}, of which {100 * USABLE_SHARE:.0f} "
            f"% can be used; fewer train.global_batch_size{lower} or a larger machine need less"
        )
    time, why = step_time(work, machine, mesh), tuple(problems)
    return Choice(mesh=mesh, remat=remat, memory=memory, time=time, hbm_bytes_per_chip=hbm_bytes, problems=why)
