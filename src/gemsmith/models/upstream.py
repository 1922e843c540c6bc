"""What JAX and Qwix do otherwise than the models here need: the ledger of gemsmith.models.

Each entry: what upstream does; what stands here for it; the version that it was seen in, and where; and the test that
fails once upstream has changed, so that the entry and its code can go. JAX: https://github.com/jax-ml/jax, Qwix:
https://github.com/google/qwix.

JAX gives a uint4 a byte of its own on CPU, twice what it has to hold.
    here:  quantization.quantize packs two values in a byte
    seen:  jax 0.10.2, https://github.com/openxla/xla/tree/main/xla/pjrt/cpu
    until: tests/models/test_upstream.py::test_jax_gives_a_uint4_a_byte_on_cpu

JAX refuses arrays of uint4 on a mesh in a function that was compiled ahead.
    here:  quantization.quantize packs two values in a byte
    seen:  jax 0.10.2, jax/_src/interpreters/pxla.py
    until: tests/models/test_upstream.py::test_jax_refuses_uint4_on_a_mesh_once_compiled

Qwix looks every value of nf4 up in a table, which a TPU does one by one.
    here:  quantization.dequantize chooses among the levels bit by bit
    seen:  qwix 0.1.8, qwix/_src/core/numerics.py
    until: tests/models/test_upstream.py::test_qwix_looks_nf4_up_in_a_table

JAX multiplies every row by every expert in ragged_dot on CPU.
    here:  moe._block_products, wherever it is not a TPU
    seen:  jax 0.10.2, jax/_src/lax/lax.py
    until: tests/models/test_upstream.py::test_jax_multiplies_every_row_by_every_expert_on_cpu

JAX compares all pairs of positions to make splash attention's masks: minutes of it at 131,072.
    here:  splash._ByBlocks
    seen:  jax 0.10.2, jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_mask.py
    until: tests/models/test_upstream.py::test_jax_compares_the_positions_of_blocks_that_are_seen_whole

JAX's splash kernel does not say over which axes of a mesh its result varies.
    here:  splash_attention's shard_map does not check it
    seen:  jax 0.10.2, jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_kernel.py
    until: tests/models/test_upstream.py::test_jax_does_not_say_over_which_axes_splash_attention_varies
"""
