"""The compiled step: made in a thread, so that SIGTERM is heard meanwhile, and kept on disk for the next start.

What XLA is told, by platform, is left out by `train.optimizations: off`. On TPU it has the next layer's weights
gathered while this one's matmuls run; benchmarks/tpu_compile.py has rows with and without.
"""

import atexit
import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import jax

from gemsmith.errors import InputError, MachineError, RecipeError, last_line
from gemsmith.recipe.schema import Train
from gemsmith.system.characters import escape_control_chars
from gemsmith.system.files import expanduser
from gemsmith.system.signals import leave
from gemsmith.train.jax.distributed import check_accelerator
from gemsmith.train.jax.upstream import count_tpu_hosts
from gemsmith.train.resume import Stop

Option = bool | int | float | str
_REFUSALS = (jax.errors.JaxRuntimeError, TypeError, ValueError)

# By the sparse cores, where the chip has them (v5p, v6e, tpu7x), and nothing waits for the core.
SPARSE_CORE_GATHERS: dict[str, Option] = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
    "xla_sc_enable_instruction_fusion": False,
    # XLA takes these gathers for shorter than they are, and begins them too late.
    "xla_tpu_sparse_core_all_gather_latency_multiplier": 3,
}
# On other chips by the matmuls' own programs, which pass shards on between their tiles.
FUSED_GATHERS: dict[str, Option] = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
# Else the matmul of the loss's gradient is cut into one for each device, whose sums go around a ring (docs/log).
WHOLE_MATMULS: dict[str, Option] = {"xla_tpu_enable_windowed_einsum_for_reduce_scatter": False}

COMPILER_OPTIONS: dict[str, dict[str, Option]] = {
    "tpu": SPARSE_CORE_GATHERS | FUSED_GATHERS | WHOLE_MATMULS,
    # Matmuls and sums with what is beside them by YNNPACK, not only matmuls alone: an 84 M model's layers, forward and
    # back, took 5.9 s on two cores where they took 7.1. benchmarks/train_cpu.py.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"},
}


def compiler_options(platform: str, train: Train) -> dict[str, Option]:
    """Gemsmith's flags for a platform of JAX's, such as "tpu", with the recipe's over them; null takes one away.

    Raises RecipeError for a null that takes nothing away.
    """
    ours = COMPILER_OPTIONS.get(platform, {})
    for name, value in train.compiler_options.items():
        if value is None and name not in ours:
            raise RecipeError(
                f"train.compiler_options.{name}: null takes away a flag that Gemsmith sets, which it does not set on "
                f"{platform}; name one of those that it sets there ({', '.join(ours) or 'none'}), or leave it out"
            )
    flags = {**(ours if train.optimizations == "auto" else {}), **train.compiler_options}
    return {name: value for name, value in flags.items() if value is not None}


def explain_refusal(error: BaseException, flags: Mapping[str, Option], train: Train) -> InputError | None:
    """What to raise where XLA refused one of the flags: it names the flag, whose it is, and what to do.

    A program of one sum does not get it either; those that the message names come first. None for another error.
    """
    text = str(error)
    if not isinstance(error, _REFUSALS) or text.startswith("RESOURCE_EXHAUSTED"):
        return None
    named = [name for name in flags if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    refused = (name for name in dict.fromkeys([*named, *flags]) if _refused({name: flags[name]}))
    name = next(refused, named[0] if named and text.startswith("INVALID_ARGUMENT") else None)
    if name is None:
        return None
    refusal = f"XLA on {jax.default_backend()} does not take {name}={json.dumps(flags[name])} ({last_line(error)})"
    key = f"train.compiler_options.{name}"
    if name in train.compiler_options:
        return RecipeError(f"{key}: the recipe sets it, but {refusal}; mend it, or leave it out")
    return MachineError(
        f"{refusal}, which Gemsmith sets itself; take it away with: --set {key}=null, or all that Gemsmith tunes with: "
        "--set train.optimizations=off"
    )


def check_flags(train: Train) -> int:
    """How many flags XLA gets here. Raises InputError for one that it does not take."""
    flags = compiler_options(jax.default_backend(), train)
    if error := _refused(flags):
        raise explain_refusal(error, flags, train) or error
    return len(flags)


def main() -> int:
    """Returns 0 where XLA takes its flags, those of the section `train` on stdin among them; or 2, and prints why not.

    Of a TPU slice of several hosts, whose devices are there once all have started, the environment's are asked alone.
    """
    train = Train.model_validate_json(sys.stdin.read())
    if count_tpu_hosts() > 1:
        jax.config.update("jax_platforms", "cpu")
        train = Train()
    try:
        check_accelerator()
        check_flags(train)
    except InputError as error:
        print(escape_control_chars(str(error), lines=False))
        return 2
    return 0


def _refused(flags: dict[str, Any]) -> Exception | None:
    """What XLA says against a program of one sum with these flags; None where it takes them."""
    try:
        jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), "float32")).compile(compiler_options=flags)
    except _REFUSALS as error:
        return error
    return None


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A step that takes the arguments of `Step.update`, or another program's, and how it came about."""

    update: Any
    seconds: float
    from_cache: bool


def use_compile_cache() -> None:
    """Lets JAX keep compiled programs in ~/.cache/gemsmith/compiled, unless JAX_COMPILATION_CACHE_DIR is set.

    GEMSMITH_CACHE moves ~/.cache/gemsmith, JAX_ENABLE_COMPILATION_CACHE=false turns it off. It keeps 10 GiB.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = expanduser(os.environ.get("GEMSMITH_CACHE", "~/.cache/gemsmith")) / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", 10 * 2**30)


def compile_program(program: Any, arguments: tuple[Any, ...], stop: Stop, train: Train) -> Compiled | None:
    """A jitted function, compiled for these arguments or their shapes; None where `stop` was set first.

    Raises InputError where XLA does not take a flag of the recipe's, or one of Gemsmith's own.
    """
    begin_s, flags = time.monotonic(), compiler_options(jax.default_backend(), train)
    work: Future[Any] = Future()

    def compiles() -> None:
        try:
            work.set_result(program.lower(*arguments).compile(compiler_options=flags))
        except Exception as error:  # noqa: BLE001 - whoever waits raises it again
            work.set_exception(error)

    # XLA cannot be told to stop, and the interpreter's end would crash under it: the process leaves without one.
    atexit.register(_leave, work, stop)
    hits: list[str] = []  # an entry for each program that JAX takes from its cache meanwhile

    def listen(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        threading.Thread(target=compiles, daemon=True).start()
        while not wait([work], timeout=0.1).done:
            if stop.is_set():
                return None
    finally:
        jax.monitoring.unregister_event_listener(listen)
    atexit.unregister(_leave)
    if error := work.exception():
        raise explain_refusal(error, flags, train) or error
    return Compiled(update=work.result(), seconds=time.monotonic() - begin_s, from_cache=bool(hits))


def _leave(work: Future[Any], stop: Stop) -> None:
    if not work.done():
        leave(128 + stop.number if stop.is_set() else 130)


if __name__ == "__main__":
    sys.exit(main())
