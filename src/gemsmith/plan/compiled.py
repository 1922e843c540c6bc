"""What XLA's compiler for TPUs says of a step, kept from one plan to the next, in place of the formula's estimate."""

import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from gemsmith.errors import GemsmithError, InputError, MachineError
from gemsmith.hardware import Machine
from gemsmith.hardware.model import ImageWork
from gemsmith.plan.aot import compile as compiler
from gemsmith.plan.aot.compile import Limits
from gemsmith.plan.cost import rounded, rounded_range
from gemsmith.plan.mesh import GIB, Choice
from gemsmith.recipe.keys import KEYS
from gemsmith.recipe.load import with_values
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.plan_records import CompiledStep
from gemsmith.system.characters import escape_control_chars
from gemsmith.system.files import sha256_json, write_text

SLOWEST = 1.84
"""What the only published TPU run took over what its compiled step says (arXiv 2605.25645: 1.21 s a row of 3072)."""
COMPILERS = ("jax", "jaxlib", "libtpu", "flax", "qwix", "optax")
SOURCES = ("models", "train/jax", "plan/aot", "arch", "recipe/backends.py", "hardware/model", "images")
"""What makes the program, or reads it: another version of any of it is compiled again."""


def check_compiles(recipe: Recipe, machines: Sequence[Machine]) -> None:
    """Raises InputError where the step is compiled for none of the machines, MachineError without a compiler."""
    if not any(_compiles_for(recipe, machine) for machine in machines):
        names = ", ".join(machine.name for machine in machines)
        raise InputError(
            f"--compile: the step of train.backend {recipe.train.backend} is not compiled for {names}; name TPUs of "
            "the catalog that have a topology, such as v5p-8, with --machine, and train.backend tunix"
        )
    compiler.check_compiler()


def _compiles_for(recipe: Recipe, machine: Machine) -> bool:
    chip = machine.chip
    return recipe.train.backend == "tunix" and bool(machine.topology and chip.clock_hz and chip.link_bytes_per_s)


def with_compiled(choice: Choice, step: CompiledStep, machine: Machine) -> Choice:
    """The choice with the compiler's memory and time; what XLA refuses or does not fit is a problem of it."""
    problems = [problem for problem in choice.problems if not problem.startswith("needs ")]
    if step.error is not None or step.peak_bytes is None or step.step_s is None:
        return replace(choice, problems=(*problems, f"the compiler: {step.error}"))
    limit = machine.chip.hbm_bytes
    if step.peak_bytes > limit:
        problems.append(f"needs {step.peak_bytes / GIB:.1f} GiB a chip of {limit / GIB:.1f}, says the compiler")
    low, high = step.step_s
    time = replace(choice.time, low_s=low, high_s=high)
    return replace(choice, hbm_bytes_per_chip=step.peak_bytes, time=time, problems=tuple(problems))


def compiled_note(step: CompiledStep) -> str:
    """What changed against the formula, in a sentence."""
    if step.error is not None or step.peak_bytes is None or step.step_s is None:
        return f"compiled for {step.topology}: {step.error}; by formula {step.formula_bytes / GIB:.1f} GiB a chip"
    low, high = step.step_s
    change = 100 * (step.peak_bytes / step.formula_bytes - 1)
    return (
        f"compiled for {step.topology}{' before' if step.cached else f' in {step.cpu_s:.0f} CPU-s'}: "
        f"{step.peak_bytes / GIB:.1f} GiB a chip, by formula {step.formula_bytes / GIB:.1f} ({change:+.1f} %); a step "
        f"{low:.4g} to {high:.4g} s, by formula {step.formula_step_s[0]:.4g} to {step.formula_step_s[1]:.4g}; the high "
        f"end is {SLOWEST} times the program's, as the only published run was; parts of the memory are the formula's"
    )


def compile_chosen(
    recipe: Recipe, choice: Choice, machine: Machine, images: ImageWork | None, limits: Limits
) -> CompiledStep | None:
    """What compiler and formula say of the recipe with the chosen mesh; None where nothing is compiled there."""
    if not _compiles_for(recipe, machine) or any(not problem.startswith("needs ") for problem in choice.problems):
        return None
    recipe = with_values(recipe, [("train.mesh", choice.mesh)])
    file = cache_folder() / f"{cache_key(recipe, machine, images)}.json"
    try:
        step = CompiledStep.model_validate_json(file.read_bytes()).model_copy(update={"cached": True})
    except (FileNotFoundError, ValueError):  # not compiled yet, or not kept whole
        note = f"{machine.name}: compiling for {machine.topology}, which takes minutes ..."
        print(escape_control_chars(note), file=sys.stderr)
        try:
            step = _compile(recipe, machine, images, limits)
        except MachineError as error:
            step = CompiledStep(topology=machine.topology, versions=_versions(), error=str(error))
        if step.error is None or "XLA:" in step.error:  # what XLA refuses it refuses again; others are limits of today
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, step.model_dump_json(indent=1) + "\n")
    formula_step_s = rounded_range((choice.time.low_s, choice.time.high_s))
    return step.model_copy(update={"formula_bytes": choice.hbm_bytes_per_chip, "formula_step_s": formula_step_s})


def cache_folder() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "gemsmith" / "compiled"


def cache_key(recipe: Recipe, machine: Machine, images: ImageWork | None = None) -> str:
    """The SHA-256 of all that a compiled step's numbers depend on: recipe, chip, versions, Gemsmith's own code."""
    values, root, code = recipe.model_dump(mode="json"), Path(__file__).parents[1], hashlib.sha256()
    for path in (root / name for name in SOURCES):  # a version's number stays while its code is worked on
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            code.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    chip, apart = machine.chip, {name for name, key in KEYS.items() if not key.compiled}
    depends = {
        "recipe": {key: values[key] for key in ("model", "lora", "optimizer")}
        | {"length": recipe.data.max_length, "seed": recipe.seed}
        | {"train": {key: value for key, value in values["train"].items() if f"train.{key}" not in apart}},
        "machine": [machine.topology, chip.hbm_bytes, chip.flops_per_s, chip.hbm_bytes_per_s],
        "speeds": [chip.clock_hz, chip.link_bytes_per_s, SLOWEST],
        "versions": _versions(),
        "code": code.hexdigest(),
        "images": None if images is None else [images.images, images.soft_tokens],
    }
    return sha256_json(depends)


def _compile(recipe: Recipe, machine: Machine, images: ImageWork | None, limits: Limits) -> CompiledStep:
    from gemsmith.plan.aot.timeline import walk  # here: every plan starts without it

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        facts = compiler.compile_in_child(recipe, folder, topology=machine.topology, images=images, limits=limits)
        places = [tuple(each) for each in facts["coordinates"]]
        try:
            costs = walk((folder / "step.hlo").read_text(), machine.chip, coordinates=places)
        except GemsmithError as error:
            raise MachineError(f"the compiled program cannot be read: {error}") from None
    return CompiledStep(
        topology=machine.topology,
        versions=_versions(),
        peak_bytes=facts["peak_bytes"],
        argument_bytes=facts["argument_bytes"],
        remat=facts["remat"],
        step_s=rounded_range((costs.step_low_s, max(costs.step_serial_s, SLOWEST * costs.step_high_s))),
        program_s={
            "collectives_hidden": rounded(costs.step_low_s),
            "as_scheduled": rounded(costs.step_high_s),
            "collectives_exposed": rounded(costs.step_serial_s),
        },
        unpriced=costs.unpriced,
        cpu_s=round(facts["trace_cpu_s"] + facts["compile_cpu_s"], 1),
        disk_bytes=facts["peak_rss_bytes"],
    )


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in COMPILERS}
