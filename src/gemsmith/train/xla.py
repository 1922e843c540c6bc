"""What XLA is told when it compiles a training step, by platform."""

COMPILER_OPTIONS: dict[str, dict[str, bool | str]] = {
    # Weights of the next layer are gathered while the matmuls of this one run: benchmarks/tpu_compile.py has rows with and without.
    "tpu": {
        "xla_enable_async_all_gather": True,
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        # Else the matmul of the loss's gradient is cut into one for each device, whose sums go around a ring (docs/log.md).
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    },
    # Matmuls and sums with what is beside them by YNNPACK, not only matmuls alone: an 84 M model's layers, forward and back, took 5.9 s
    # on two cores where they took 7.1. benchmarks/train_cpu.py.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"},
}
