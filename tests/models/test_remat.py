import re

import jax
import jax.numpy as jnp
import pytest

from gemsmith.models.gemma4 import rematerialized


def program(*, in_turn: bool) -> str:
    """The program of the gradient of two layers, each of which is computed again."""
    layer = rematerialized(jnp.cos, "layer", in_turn=in_turn)
    x = jnp.ones(4)
    return jax.jit(jax.grad(lambda x, scale: (scale * layer(layer(x))).sum())).lower(x, x).as_text()


def test_a_layer_is_computed_again_once_its_gradient_is_there():
    barriers = re.findall(r"optimization_barrier (%\w+), (%\w+)", program(in_turn=True))
    # The second layer's input with the gradient of its output; then the first's.
    assert len(barriers) == 2 and barriers[1][0] == "%arg0"


def test_without_turns_nothing_orders_the_layers():
    assert "optimization_barrier" not in program(in_turn=False)


@pytest.mark.parametrize("in_turn", [True, False])
def test_turns_change_no_gradient(in_turn):
    layer = rematerialized(jnp.cos, "layer", in_turn=in_turn)
    assert jax.grad(lambda x: layer(layer(x)))(0.5) == jax.grad(lambda x: jnp.cos(jnp.cos(x)))(0.5)
