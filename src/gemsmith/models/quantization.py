"""A frozen base of 4 or 8 bits a weight: quantized values and scales, dequantized where they are used.

kind   qvalue   weight                                 scale
nf4    4 bits   one of 16 levels * scale               for every 64 inputs of an output, their largest magnitude
int8   8 bits   -127 … 127 * scale                     for every output, its largest magnitude / 127

nf4 is NormalFloat of QLoRA (https://arxiv.org/abs/2305.14314), as bitsandbytes has it without double quantization: 4.25
bits a weight, as a bfloat16 weight's largest magnitude is a bfloat16. Two values are packed in a byte here, where Qwix
has arrays of uint4: those take a byte each on CPU, and a step compiled ahead refuses them on a mesh. Qwix's way back
from nf4 looks every value up in a table, which a TPU does one by one. docs/upstream.md says until when.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gemsmith.arch.lora_targets import KINDS, LEVELS, block_of

Kind = Literal["nf4", "int8"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Matrices (…, in, out) as `qvalue` (…, in / 2 for nf4, out) and `scale` (…, blocks of inputs, out).

    A byte of nf4 holds the value of an input, and above it that of the one half a block further.
    """

    qvalue: jax.Array
    scale: jax.Array
    kind: Kind = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrices'."""
        *outer, rows, outputs = self.qvalue.shape
        return (*outer, rows * (2 if self.kind == "nf4" else 1), outputs)

    @property
    def dtype(self) -> Any:
        """Of the matrices, once they are dequantized."""
        return self.scale.dtype


def base_kinds(dtype: str) -> tuple[str, Kind | None]:
    """What a base of `train.dtype` computes in, and how its matrices are held.

    >>> base_kinds("float32"), base_kinds("nf4")
    (('float32', None), ('bfloat16', 'nf4'))
    """
    return ("bfloat16", cast(Kind, dtype)) if dtype in KINDS else (dtype, None)


def quantize(weight: jax.Array, kind: Kind) -> Quantized:
    """Quantized values and scales of matrices (…, in, out); the scales have the weight's dtype."""
    *outer, inputs, outputs = weight.shape
    block = block_of(inputs, kind)
    blocks = weight.astype(jnp.float32).reshape(*outer, inputs // block, block, outputs)  # (…, blocks, block, out)
    scale = jnp.abs(blocks).max(axis=-2) / (1 if kind == "nf4" else 127)  # (…, blocks, out)
    # What is divided by is what is stored, so that rounding the scale adds nothing; XLA would leave a mere cast out. A
    # block of zeros has the scale 0.
    kept = jnp.finfo(weight.dtype)
    scale = jax.lax.reduce_precision(scale, kept.nexp, kept.nmant).astype(weight.dtype)
    divisor = jnp.where(scale == 0, 1, scale).astype(jnp.float32)[..., None, :]  # (…, blocks, 1, out)
    if kind == "int8":
        size = jnp.abs(blocks)
        low = jnp.floor(size / divisor)
        # Products of 8 bits each are exact in float32, where XLA's division may be off: the same on every machine.
        rounded = jnp.sign(blocks) * jnp.minimum(low + (size > (low + 0.5) * divisor), 127)
        return Quantized(qvalue=rounded.astype(jnp.int8).reshape(weight.shape), scale=scale, kind=kind)
    assert block % 2 == 0, f"{inputs} inputs: an odd number cannot be packed"
    scaled, midpoints = blocks / divisor, (np.array(LEVELS[1:]) + np.array(LEVELS[:-1])) / 2  # …, (15,)
    # The number of the nearest level; halfway between two, of the lower.
    level: Any = sum((scaled > midpoint).astype(jnp.uint8) for midpoint in midpoints)
    low, high = jnp.split(level, 2, axis=-2)  # (…, blocks, block / 2, out) each
    return Quantized(qvalue=(low | high << 4).reshape(*outer, inputs // 2, outputs), scale=scale, kind=kind)


def dequantize_state(state: nnx.State) -> nnx.State:
    """The state with its quantized matrices dequantized.

    A backward pass under `jax.checkpoint` dequantizes them again, unless its policy saves the results of custom_vjp.
    """
    leaves = []
    for path, leaf in nnx.to_flat_state(state):
        value = leaf.get_value()
        leaves.append((path, leaf.replace(dequantize(value)) if isinstance(value, Quantized) else leaf))
    return nnx.from_flat_state(leaves)


def holds_quantized(tree: Any) -> bool:
    """Whether any array in it is quantized."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return any(isinstance(leaf, Quantized) for leaf in leaves)


@jax.custom_vjp
def dequantize(array: Quantized) -> jax.Array:
    """The matrices (…, in, out) in the scales' dtype, multiplied in float32. They are frozen: there is no gradient."""
    *outer, blocks, outputs = array.scale.shape
    qvalue = array.qvalue.reshape(*outer, blocks, -1, outputs)  # (…, blocks, block / 2 for nf4, out)
    if array.kind == "nf4":
        values = _level(jnp.concatenate([qvalue & 15, qvalue >> 4], axis=-2))
    else:
        values = qvalue.astype(jnp.float32)
    return (values * array.scale.astype(jnp.float32)[..., None, :]).astype(array.dtype).reshape(array.shape)


dequantize.defvjp(lambda array: (dequantize(array), None), lambda *_: (None,))


def _level(qvalue: jax.Array) -> jax.Array:
    """The levels of the quantized values: of 16 by the lowest bit 8 are left, of these by the next bit 4, and so on."""
    left: list[Any] = [jnp.float32(level) for level in LEVELS]
    for bit in range(4):
        is_set = (qvalue >> bit) & 1 == 1
        left = [jnp.where(is_set, high, low) for low, high in zip(left[::2], left[1::2], strict=True)]
    return cast(jax.Array, left[0])
