"""Which devices hold what: the mesh that a recipe asks for, or the one that suits the rows and the machine.

Several TPU slices lie along replica, the outermost axis: each has whole copies of the weights, and only the gradients
of the adapters are summed over the data center network between them.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from gemsmith.arch import Variant
from gemsmith.errors import RecipeError
from gemsmith.hardware.model import ImageWork, StepCost, choose_remat, micro_batches, on_chips, step_cost
from gemsmith.hardware.model.limits import auto_mesh, check_mesh, check_splash
from gemsmith.models import Execution
from gemsmith.models.sharding import AXES
from gemsmith.recipe.backends import Remat, default_optimizations, heads_fill_lanes
from gemsmith.recipe.schema import Mesh as MeshSizes
from gemsmith.recipe.schema import Recipe
from gemsmith.system.format import mesh as name_mesh
from gemsmith.train.jax.compile import compiler_options


def make_mesh(recipe: Recipe, variant: Variant) -> Mesh:
    """All devices in the axes replica, fsdp, sequence and tp. Raises InputError where they cannot be laid out so."""
    devices = jax.devices()
    slices = count_slices(devices)
    sizes = mesh_sizes(recipe, variant, devices=len(devices), kind=devices[0].device_kind, slices=slices)
    return lay_out(devices, sizes)


def lay_out(devices: Sequence[Any], sizes: Mapping[str, int]) -> Mesh:
    """The devices as a mesh: slices in their order along replica, and within each its chips along the other axes."""
    types, slices = (AxisType.Auto,) * len(AXES), count_slices(devices)
    if slices == 1:
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=types, devices=devices)
    within = {**sizes, "replica": sizes["replica"] // slices}
    over = {axis: slices if axis == "replica" else 1 for axis in AXES}
    grid = mesh_utils.create_hybrid_device_mesh(tuple(within.values()), tuple(over.values()), devices)
    return Mesh(grid, AXES, axis_types=types)


def count_slices(devices: Sequence[Any]) -> int:
    """The TPU slices that the devices are of; devices of other kinds say nothing of slices, and are one."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def mesh_sizes(recipe: Recipe, variant: Variant, *, devices: int, kind: str, slices: int = 1) -> dict[str, int]:
    """The size of every axis, the recipe's or chosen.

    Raises RecipeError where they do not fit the devices, the slices, the rows or the heads.
    """
    wanted = recipe.train.mesh
    sizes = (auto_mesh(recipe, devices, slices) if wanted == "auto" else wanted).model_dump()
    count = math.prod(sizes.values())
    if count != devices:
        raise RecipeError(
            f"train.mesh: {name_mesh(sizes)} needs {count} devices, this machine has {devices} ({kind}); "
            f"set their product to {devices}, or auto"
        )
    if sizes["replica"] % slices:
        raise RecipeError(
            f"train.mesh.replica: {sizes['replica']} is no multiple of this machine's {slices} slices, which only "
            f"replica may cross; set it to {slices}, or the mesh to auto"
        )
    check_mesh(recipe, variant, sizes)
    return sizes


def make_execution(
    recipe: Recipe, variant: Variant, mesh: Mesh, *, device_bytes: float | None = None, images: ImageWork | None = None
) -> Execution:
    """How this recipe's forward pass runs on the mesh, whose devices have so much memory; default: what they say.

    Raises RecipeError for rows and heads that the splash kernel cannot take, for offloading where there is no other
    memory, and where train.compiler_options take a flag away that Gemsmith does not set there.
    """
    train, platform = recipe.train, mesh.devices.flat[0].platform
    compiler_options(platform, train)
    how = train.attention
    if how == "auto":
        how = "splash" if platform == "tpu" and heads_fill_lanes(variant) else "dense"
    if how == "splash":
        if platform != "tpu":
            raise RecipeError(
                f"train.attention: splash is a kernel for TPU, the devices here are {platform}; set dense, or auto"
            )
        check_splash(recipe, variant, mesh.shape)
    if train.offload and platform == "cpu":
        raise RecipeError("train.offload: the devices here are cpu, whose memory is the host's; leave it out")
    remat: Remat
    if train.remat == "auto":
        remat = choose_remat(*_work(recipe, variant, mesh, images), device_bytes=device_bytes or memory_bytes(mesh))
    else:
        remat = train.remat
    optimizations = default_optimizations(platform, train.optimizations)
    return Execution(attention=how, optimizations=optimizations, remat=remat, offload=train.offload, mesh=mesh)


def micro_batches_on(recipe: Recipe, variant: Variant, mesh: Mesh) -> int:
    """The micro-batches of a step on the mesh: the recipe's, or one for each row where a device goes by row."""
    return micro_batches(*_work(recipe, variant, mesh))


def _work(recipe: Recipe, variant: Variant, mesh: Mesh, images: ImageWork | None = None) -> tuple[StepCost, MeshSizes]:
    work = on_chips(step_cost(recipe, variant, images=images), mesh.devices.flat[0].platform, recipe)
    return work, MeshSizes(**{axis: mesh.shape[axis] for axis in AXES})


def memory_bytes(mesh: Mesh) -> float:
    """What each device of this process can hold; CPU devices share the machine's memory."""
    device = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    stats, pages = device.memory_stats() or {}, os.sysconf("SC_PHYS_PAGES")
    return stats.get("bytes_limit") or pages * os.sysconf("SC_PAGE_SIZE") / jax.local_device_count()
