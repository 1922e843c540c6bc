"""The training step compiled for TPUs that do not exist: its text, its memory, and what compiling cost.

XLA's compiler for TPUs comes with libtpu and needs no TPU. One process compiles one step: libtpu reads its environment
once, and CPU seconds and peak memory are the process's.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemsmith.arch import find_variant
from gemsmith.errors import GemsmithError, MachineError, first_line
from gemsmith.hardware import load_catalog
from gemsmith.hardware.model import ImageWork, images_of
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Recipe

# Without them libtpu asks the cloud's metadata server what machine this is, and two processes fight for a lock file.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
INSTALL = ".venv/bin/pip install --no-deps -r requirements/tpu.lock"
# A v6e host has 8 chips; without this a slice of 8 is laid out as two hosts, and one of a single chip is unknown.
_ONE_HOST = {"v6e:1x1": (1, 1, 1), "v6e:2x4": (2, 4, 1)}
_POLL_S = 0.2
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Limits:
    seconds: float = 1800.0
    memory_bytes: float = 12e9


def check_compiler() -> None:
    """Raises MachineError with the command that installs XLA's compiler for TPUs, where it is missing."""
    if importlib.util.find_spec("libtpu") is None:
        raise MachineError(f"libtpu is not installed, so nothing can be compiled for TPUs; install it with: {INSTALL}")


def open_topology(name: str) -> Any:
    """The absent slice's devices, such as of v5p:2x2x1 or v6e:2x4. To be called before anything else opens libtpu."""
    check_compiler()
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    bounds = {"chips_per_host_bounds": _ONE_HOST[name]} if name in _ONE_HOST else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds).devices
    except (RuntimeError, ValueError) as error:
        raise MachineError(f"topology {name}: libtpu does not know it ({first_line(error)})") from None


def lower_step(
    recipe: Recipe, devices: Any, *, device_bytes: float | None = None, images: ImageWork | None = None
) -> tuple[Any, Any]:
    """The recipe's step on arrays with shapes and places but no values, and how it runs (gemsmith.models.Execution)."""
    from functools import partial

    import jax
    from flax import nnx
    from jax.sharding import AxisType

    from gemsmith.models import abstract_model, base_kinds
    from gemsmith.train.jax.images import bucket_shape
    from gemsmith.train.jax.lora import add_adapters
    from gemsmith.train.jax.mesh import make_execution, mesh_sizes, micro_batches_on
    from gemsmith.train.jax.step import input_shapes, make_optimizer, make_step, shard_opt_state

    variant = find_variant(str(recipe.model))
    sizes = mesh_sizes(recipe, variant, devices=len(devices), kind=devices[0].device_kind)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)
    dtype, quantized = base_kinds(recipe.train.dtype)
    how = make_execution(recipe, variant, mesh, device_bytes=device_bytes, images=images)
    lora = None if recipe.train.method == "full" else recipe.lora
    kinds: dict[str, Any] = {"dtype": dtype, "quantized": quantized, "vision": images is not None}
    model = abstract_model(variant, **kinds, execution=how, trains=lora is None)
    if lora:
        model = add_adapters(model, variant, lora, seed=recipe.seed)
    optimizer = nnx.eval_shape(partial(nnx.Optimizer, tx=make_optimizer(recipe.optimizer), wrt=nnx.LoRAParam), model)
    nnx.update(optimizer, shard_opt_state(nnx.state(optimizer), model))
    micro_batches = micro_batches_on(recipe, variant, mesh)
    step = make_step(model, optimizer, lora=lora, seed=recipe.seed, micro_batches=micro_batches)
    shape = None if images is None else bucket_shape(images.vision, images)
    inputs = input_shapes(mesh, rows=recipe.train.global_batch_size, length=recipe.data.max_length, images=shape)
    return step.update.lower(step.trained, step.moments, step.frozen, inputs), how


def compile_for(lowered: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Text and facts of a step compiled with XLA's flags, of one chip. Raises MachineError where it does not fit."""
    import jax

    begin = time.process_time()
    try:
        compiled = lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        lines = (line.strip() for line in str(error).splitlines()[:3])
        raise MachineError(f"XLA: {' '.join(filter(None, lines))[:500]}") from None
    compile_cpu_s = time.process_time() - begin
    # Before the texts are printed, which is not part of compiling.
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = compiled.memory_analysis()
    return {
        "text": compiled.as_text(),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,  # of arguments that outputs overwrite, counted in both
        "peak_bytes": memory.peak_memory_in_bytes,  # the most that XLA has in use at once
        "host_bytes": memory.host_temp_size_in_bytes,  # temporaries there, where activations are offloaded
        "code_bytes": memory.generated_code_size_in_bytes,
        # Of the program before XLA: a second start finds it in the persistent cache if it is the same.
        "lowered_sha256": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        "compile_cpu_s": compile_cpu_s,
        "peak_rss_bytes": peak_rss_bytes,  # of the whole process, from its start until the step is compiled
    }


def compile_in_child(
    recipe: Recipe,
    folder: Path,
    *,
    topology: str,
    options: Mapping[str, Any] | None = None,
    images: ImageWork | None = None,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """The facts of compile_for and main but the text, which is in folder/step.hlo.

    `options`: XLA's flags; None: those that `gemsmith train` sets. `images`: what every row has room for. Raises
    MachineError with XLA's own words where it refuses the step, and where a limit is reached.
    """
    request: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "topology": topology, "options": options}
    if images is not None:
        request["images"] = {"images": images.images, "soft_tokens": images.soft_tokens}
    (folder / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "gemsmith.plan.aot.compile", str(folder)]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            begin = time.monotonic()
            while child.poll() is None:
                if limits and time.monotonic() - begin > limits.seconds:
                    raise MachineError(f"compiling took more than {limits.seconds / 60:.3g} minutes, and was stopped")
                held = 0
                with contextlib.suppress(OSError, IndexError):  # it has just ended
                    held = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * _PAGE_BYTES
                if limits and held > limits.memory_bytes:
                    gb = f"{held / 1e9:.1f} GB of {limits.memory_bytes / 1e9:.1f}"
                    raise MachineError(f"compiling held {gb} that it may, and was stopped")
                time.sleep(_POLL_S)
        finally:
            child.kill()  # which does nothing to one that has ended
            child.wait()
        if child.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").splitlines()
            last = next((line for line in reversed(lines) if line.strip()), f"exit code {child.returncode}")
            raise MachineError(last.removeprefix("error: "))
    facts: dict[str, Any] = json.loads((folder / "step.json").read_text())
    return facts


def main(folder: Path) -> None:
    """Compiles what folder/request.json asks for, into folder/step.hlo and folder/step.json.

    That is the step which `gemsmith train` runs for the recipe. Raises InputError for what cannot be laid out there.
    """
    request = json.loads((folder / "request.json").read_text())
    recipe, options, topology = build_recipe(request["recipe"]), request["options"], request["topology"]
    if options is None:
        from gemsmith.train.jax.compile import compiler_options

        options = compiler_options("tpu", recipe.train)
    images = None
    if "images" in request:
        images = images_of(recipe, find_variant(str(recipe.model)), **request["images"])
    devices = open_topology(topology)
    begin, chip = time.process_time(), load_catalog().chips[topology.partition(":")[0]]
    lowered, how = lower_step(recipe, devices, device_bytes=chip.hbm_bytes / chip.devices, images=images)
    facts = {
        "coordinates": [list(device.coords) for device in how.mesh.devices.flat],  # of each partition's chip
        "remat": how.remat,
        # Python to StableHLO: what a start pays even if the compiled program is in the persistent cache.
        "trace_cpu_s": time.process_time() - begin,
        "options": options,
    }
    step = compile_for(lowered, options)
    (folder / "step.hlo").write_text(step.pop("text"))
    (folder / "step.json").write_text(json.dumps(step | facts, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except GemsmithError as error:
        sys.exit(f"error: {error}")
