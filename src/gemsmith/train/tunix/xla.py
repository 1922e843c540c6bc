"""What XLA is told when it compiles a training step, by platform.

On TPU the next layer's weights are gathered while this one's matmuls run; benchmarks/tpu_compile.py has rows with and
without.
"""

from collections.abc import Mapping

Option = bool | int | float | str

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


def compiler_options(platform: str, own: Mapping[str, Option]) -> dict[str, Option]:
    """Gemsmith's for a platform of JAX's, with the recipe's own over them."""
    return COMPILER_OPTIONS.get(platform, {}) | dict(own)
