"""Which mesh a machine gets: every one that the model allows is tried, and of those that fit the fastest is taken."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gemsmith.arch import Variant
from gemsmith.hardware import Machine
from gemsmith.hardware.model import Memory, StepCost, choose_remat, held_on_cpu, memory_of
from gemsmith.hardware.model.step_time import StepTime, step_time
from gemsmith.recipe.backends import BACKENDS, Remat
from gemsmith.recipe.schema import Mesh

USABLE_SHARE = 0.95
"""Of a chip's memory: allocators lose some to fragments, and the formula knows nothing finer."""
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


def allowed_tp(variant: Variant) -> list[int]:
    """Values of tp that divide the heads, and the kv heads of every layer or are multiples of them.

    31B: 32 heads, 16 local and 4 global kv heads, so every power of 2 up to 32; beyond 4, devices hold copies of global
    kv heads.
    """
    kv_heads = {variant.kv_heads_of(layer) for layer in range(variant.layers)}
    divisors = (tp for tp in range(1, variant.heads + 1) if variant.heads % tp == 0)
    return [tp for tp in divisors if all(count % tp == 0 or tp % count == 0 for count in kv_heads)]


def choose_mesh(
    work: StepCost,
    machine: Machine,
    wanted: Mesh | Literal["auto"],
    *,
    remat: Remat | Literal["auto"],
    backend: str = "tunix",
) -> Choice:
    """The wanted mesh, or for `auto` the fastest of those that fit; where none fits, the one that comes closest.

    Where remat is `auto`, each with what fits it. The backend trl has neither sequence nor tp, and recomputes whole
    layers.
    """
    if backend == "trl":
        mesh = Mesh(replica=machine.slices, fsdp=machine.devices // machine.slices) if wanted == "auto" else wanted
        choice = _weigh(work, machine, mesh, "layer" if remat == "auto" else remat, backend)
        return replace(choice, problems=(*_missing_in_trl(work, machine, mesh), *choice.problems))
    if wanted != "auto":
        return _weigh(work, machine, wanted, remat)
    # As training's auto does: replica over slices, fsdp over as many of a slice's devices as divide its rows, the rest
    # over each row's positions.
    rows = max(1, work.rows // work.micro_batches // machine.slices)
    choices = []
    for tp in allowed_tp(work.variant):
        devices, rest = divmod(machine.devices // machine.slices, tp)
        if rest == 0:
            fsdp = math.gcd(rows, devices)
            mesh = Mesh(replica=machine.slices, fsdp=fsdp, sequence=devices // fsdp, tp=tp)
            choices.append(_weigh(work, machine, mesh, remat))
    usable = [choice for choice in choices if not choice.problems]
    if usable:
        return min(usable, key=lambda choice: choice.time.low_s + choice.time.high_s)
    return min(choices, key=lambda choice: (len(choice.problems), choice.hbm_bytes_per_chip))


def _missing_in_trl(work: StepCost, machine: Machine, mesh: Mesh) -> Iterator[str]:
    backend = BACKENDS["trl"]
    if machine.chip.kind not in backend.chips:
        yield f"train.backend trl runs on {' and '.join(kind.upper() for kind in backend.chips)}; set it to tunix"
    if any(size > 1 for axis, size in mesh.model_dump().items() if axis not in backend.mesh_axes):
        yield f"train.mesh: train.backend trl splits by {' and '.join(backend.mesh_axes)} only"
    if work.dequantizes and mesh.replica * mesh.fsdp > 1 and not backend.splits_quantized:
        yield "train.dtype: with train.backend trl a quantized base trains on one device"


def _weigh(
    work: StepCost, machine: Machine, mesh: Mesh, remat: Remat | Literal["auto"], backend: str = "tunix"
) -> Choice:
    chip = machine.chip
    if remat == "auto":
        remat = choose_remat(work, mesh, device_bytes=chip.hbm_bytes / chip.devices)
    work = replace(work, remat=remat)
    memory = memory_of(work, mesh)
    hbm_bytes = memory.total * chip.devices if chip.kind != "cpu" else held_on_cpu(work, memory.total, backend)
    problems = []
    sizes = mesh.model_dump()
    if (count := math.prod(sizes.values())) != machine.devices:
        given = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        problems.append(f"train.mesh is {count} devices ({given}); this machine has {machine.devices}")
    if mesh.replica % machine.slices:
        problems.append(
            f"train.mesh.replica is {mesh.replica}; for {machine.slices} slices it is a multiple of {machine.slices}"
        )
    allowed = allowed_tp(work.variant)
    if mesh.tp not in allowed:
        problems.append(f"train.mesh.tp is {mesh.tp}; {work.variant.name}'s heads allow {', '.join(map(str, allowed))}")
    if work.rows % (over_rows := mesh.replica * mesh.fsdp * work.micro_batches):
        micro_batches = " x micro_batches" if work.micro_batches > 1 else ""
        problems.append(
            f"train.global_batch_size is {work.rows}; replica x fsdp{micro_batches} = {over_rows} needs a multiple "
            "of it"
        )
    if work.length % mesh.sequence:
        problems.append(f"data.max_length is {work.length}; train.mesh.sequence {mesh.sequence} needs a multiple of it")
    if hbm_bytes > USABLE_SHARE * chip.hbm_bytes:
        lower = "" if remat == "layer" else ", train.remat: layer"
        problems.append(
            f"needs {hbm_bytes / GIB:.1f} GiB a chip of {chip.hbm_bytes / GIB:.1f}, of which {100 * USABLE_SHARE:.0f} "
            f"% can be used; fewer train.global_batch_size{lower} or a larger machine need less"
        )
    return Choice(
        mesh=mesh,
        remat=remat,
        memory=memory,
        time=step_time(work, machine, mesh),
        hbm_bytes_per_chip=hbm_bytes,
        problems=tuple(problems),
    )
