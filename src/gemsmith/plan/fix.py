"""The smallest change of a recipe that makes it fit a machine, found by trying changes in the order of their size.

First what trains the same: remat, mesh, micro-batches. Then fewer rows a step, then a base held in fewer bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from gemsmith.errors import RecipeError
from gemsmith.hardware import Machine
from gemsmith.hardware.model import StepCost, on_chips
from gemsmith.hardware.model.limits import check_training
from gemsmith.plan.mesh import USABLE_SHARE, Choice, choose_mesh
from gemsmith.recipe.backends import BACKENDS
from gemsmith.recipe.checks import check_recipe
from gemsmith.recipe.load import with_values
from gemsmith.recipe.schema import Recipe

DTYPES = ("float32", "bfloat16", "int8", "nf4")  # of the base, from the largest to the smallest
KEYS = ("train.remat", "train.mesh", "train.gradient_accumulation_steps", "train.global_batch_size", "train.dtype")


@dataclass(frozen=True, kw_only=True)
class Fix:
    recipe: Recipe
    changes: dict[str, Any]  # keys of the recipe -> values, as JSON has them
    choice: Choice


def find_fix(recipe: Recipe, machine: Machine, work_in: Callable[[str], StepCost]) -> Fix | None:
    """The first change that fits, or None where none does; `work_in(dtype)` is the work with the base in that dtype."""
    backend = BACKENDS[recipe.train.backend]
    if machine.chip.kind not in backend.chips:
        return None
    usable_bytes, all_rows = USABLE_SHARE * machine.chip.hbm_bytes, recipe.train.global_batch_size
    for dtype in DTYPES[DTYPES.index(recipe.train.dtype) :]:
        if dtype not in backend.dtypes or work_in(dtype).base_bytes / machine.chips > usable_bytes:  # whatever the mesh
            continue
        for rows in (all_rows >> halved for halved in range(all_rows.bit_length()) if all_rows % 2**halved == 0):
            fewest = with_values(recipe, zip(KEYS, ("layer", "auto", rows, rows, dtype), strict=True))
            if _choose(fewest, work_in, machine).hbm_bytes_per_chip > usable_bytes:
                continue  # too large with everything that saves memory, so not worth trying with less
            for changed in _changes(recipe, dtype, rows):
                if fix := _try(recipe, changed, machine, work_in):
                    return fix
    return None


def _changes(recipe: Recipe, dtype: str, rows: int) -> Iterator[Recipe]:
    """The recipe with that dtype and number of rows, and with fewer before more of the other changes."""
    train = recipe.train
    remats = [train.remat] if train.remat in ("auto", "layer") else [train.remat, "auto"]
    meshes = [train.mesh] if train.mesh == "auto" else [train.mesh, "auto"]
    fewest = min(train.gradient_accumulation_steps, rows)
    counts = [count for doubled in range(rows.bit_length()) if rows % (count := fewest << doubled) == 0]
    tried = sorted(product(range(len(remats)), range(len(meshes)), range(len(counts))), key=sum)
    for remat, mesh, count in tried:
        values = remats[remat], meshes[mesh], counts[count], rows, dtype
        yield with_values(recipe, zip(KEYS, values, strict=True))


def _try(recipe: Recipe, changed: Recipe, machine: Machine, work_in: Callable[[str], StepCost]) -> Fix | None:
    """The fix, where the changed recipe is one that can be trained, fits the machine and is not the one it was."""
    choice = _choose(changed, work_in, machine)
    if choice.problems:
        return None
    try:
        check_recipe(changed)
        check_training(changed, work_in(changed.train.dtype).variant)
    except RecipeError:
        return None
    if choice.mesh.tp > 1 and changed.train.mesh == "auto":  # which training does not choose by itself
        changed = with_values(changed, [("train.mesh", choice.mesh)])
    before, after = (each.train.model_dump(mode="json") for each in (recipe, changed))
    changes = {key: after[name] for key in KEYS if after[name := key.removeprefix("train.")] != before[name]}
    return Fix(recipe=changed, changes=changes, choice=choice) if changes else None


def _choose(recipe: Recipe, work_in: Callable[[str], StepCost], machine: Machine) -> Choice:
    train = recipe.train
    work = replace(
        work_in(train.dtype),
        rows=train.global_batch_size,
        micro_batches=train.gradient_accumulation_steps,
        remat="layer" if train.remat == "auto" else train.remat,
    )
    return choose_mesh(on_chips(work, machine.chip.kind, recipe), machine, recipe)
