"""FLOPs of the Mosaic kernels that JAX ships, from their names, block sizes and shapes in compiled text."""

import re
from math import ceil, prod

from gemsmith.aot.hlo import Computation, Instruction

# Matrix products of one block of scores, each 2 x block_q x block_kv x head_dim: scores and output; with them again,
# their gradients.
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4, "fused": 5}


def kernel_flops(call: Instruction, home: Computation) -> float | None:
    """FLOPs of one call by the kernel's own estimate, or what is known of splash, grouped matmuls, ours; else None."""
    estimate = call.config.get("custom_call_config", {}).get("cost_estimate", {})
    if int(estimate.get("flops", 0)) > 0:
        return float(estimate["flops"])
    used = [array for name in call.operands for array in home.instructions[name].arrays]
    if not any(array.dtype[0] in "bfc" for array in (*used, *call.arrays)):
        return 0.0  # only integers: a table for another kernel
    if call.name.startswith("heads_"):
        return 0.0  # gemsmith.models.heads_kernel: bound by its bytes
    if call.name.startswith("splash_"):
        return _splash(call, home)
    if call.name.startswith(("gmm", "tgmm")):
        return _grouped(call, home)
    return None


def _splash(call: Instruction, home: Computation) -> float:
    """Score blocks that run x products x 2 x block area x head_dim.

    The mask's table is (heads or 1, rows of blocks, width): width is the most blocks that any row visits. Row i of a
    causal mask, windowed or not, visits min(width, those up to its diagonal). Of queries split over chips the last part
    is taken, which sees the most keys.
    """
    kind = re.match(r"splash_m[hq]a_(fwd|dq|dkv)", call.name)
    assert kind, f"splash kernel {call.name}"
    arrays = [home.instructions[name].arrays[0] for name in call.operands]
    table = next(array for array in arrays if array.dtype.startswith("s") and len(array.shape) == 3)
    query, key = [array for array in arrays if array.dtype[0] in "bf" and len(array.shape) >= 2][:2]
    *rows, length, width = query.shape
    blocks, span = table.shape[1:]
    if kind[1] == "dkv":
        span, blocks = blocks, span
        block_kv, block_q = key.shape[-2] // blocks, _block(call, "block_q_dkv")
        visited = [min(span, ceil((key.shape[-2] - at * block_kv) / block_q)) for at in range(blocks)]
    else:
        block_q, block_kv = length // blocks, _block(call, "block_kv_dq" if kind[1] == "dq" else "block_kv")
        before = key.shape[-2] - length
        visited = [min(span, ceil((before + (at + 1) * block_q) / block_kv)) for at in range(blocks)]
    fused = kind[1] == "dkv" and '\\"use_fused_bwd_kernel\\": true' in call.attributes
    products = _PRODUCTS["fused" if fused else kind[1]]
    return 2.0 * products * prod(rows) * sum(visited) * block_q * block_kv * width


def _block(call: Instruction, name: str) -> int:
    found = re.search(rf'\\"{name}\\": (\d+)', call.attributes)
    assert found, f"{call.name} does not say {name}"
    return int(found[1])


def _grouped(call: Instruction, home: Computation) -> float:
    """A grouped matmul: each of m rows meets one group's matrix, so 2 m k n whatever the groups."""
    left, right = [
        array for name in call.operands for array in home.instructions[name].arrays if array.dtype[0] in "bf"
    ][:2]
    out = call.arrays[0].shape
    if call.name.startswith("gmm"):
        return 2.0 * prod(left.shape) * out[-1]
    return 2.0 * prod(left.shape) * right.shape[-1]
