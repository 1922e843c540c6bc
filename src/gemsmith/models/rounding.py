"""The same rounding for every number of rows, on CPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def rounded(x: jax.Array) -> jax.Array:
    """The x itself, rounded before anything is added to it; and so its gradient. Elsewhere than on CPU it is no operation at all.

    A product and a sum that XLA fuses on CPU become one instruction that rounds once, and what it fuses depends on the number of rows: a
    row's gradient in one micro-batch differed from that in another by up to 2e-5 (docs/log.md). So a comparison stands between
    the two, of x with itself: XLA cannot leave it out, since NaN would fail it, nor can LLVM join what is on its two sides.
    """
    made: jax.Array = _rounded.bind(x)
    return made


def _compared(x: jax.Array) -> jax.Array:
    return jnp.where(x == x, x, jnp.nan)  # noqa: PLR0124 - see above


def _unchanged(_: Any, x: Any) -> list[Any]:
    return [x]


# A primitive, because which platform it is for is known only where a program is lowered: for a TPU that is not there, too.
_rounded = Primitive("rounded")
_rounded.def_impl(jax.jit(rounded))
_rounded.def_abstract_eval(lambda x: x)
ad.deflinear2(_rounded, lambda gradient, _: [rounded(gradient)])
batching.defvectorized(_rounded)
mlir.register_lowering(_rounded, _unchanged)
mlir.register_lowering(_rounded, mlir.lower_fun(_compared, multiple_results=False), platform="cpu")
