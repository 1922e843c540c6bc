"""What XLA is told when it compiles a training step, by platform; `train.tuned: off` leaves all of it out.

On TPU the next layer's weights are gathered while this one's matmuls run; benchmarks/tpu_compile.py has rows with and
without.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import jax

from gemsmith.errors import InputError, MachineError, RecipeError, last_line
from gemsmith.recipe import Train

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
    flags = {**(ours if train.tuned == "auto" else {}), **train.compiler_options}
    return {name: value for name, value in flags.items() if value is not None}


def explain_refusal(error: Exception, flags: Mapping[str, Option], train: Train, *, platform: str) -> InputError | None:
    """What to raise where XLA refused one of the flags: it names the flag, whose it is, and what to do.

    None where the error is about something else.
    """
    name = _refused_flag(error, flags)
    if name is None:
        return None
    refusal = f"XLA on {platform} does not take {name}={json.dumps(flags[name])} ({last_line(error)})"
    key = f"train.compiler_options.{name}"
    if name in train.compiler_options:
        return RecipeError(f"{key}: the recipe sets it, but {refusal}; mend it, or leave it out")
    return MachineError(
        f"{refusal}, which Gemsmith sets itself; take it away with: --set {key}=null, or all that Gemsmith tunes with: "
        "--set train.tuned=off"
    )


def _refused_flag(error: Exception, flags: Mapping[str, Option]) -> str | None:
    """The flag that a program of one sum does not get either; those that the message names are tried first."""
    text = str(error)
    if not isinstance(error, _REFUSALS) or text.startswith("RESOURCE_EXHAUSTED"):
        return None
    named = [name for name in flags if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    one_sum = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), "float32"))
    refused = (name for name in dict.fromkeys([*named, *flags]) if not _compiles(one_sum, {name: flags[name]}))
    return next(refused, named[0] if named and text.startswith("INVALID_ARGUMENT") else None)


def _compiles(program: Any, flags: dict[str, Option]) -> bool:
    try:
        program.compile(compiler_options=flags)
    except _REFUSALS:
        return False
    return True
