import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from gemsmith.arch import find_variant
from gemsmith.models import moe as module
from gemsmith.models.layers import Experts
from gemsmith.models.moe import mixture_of_experts
from gemsmith.models.sharding import AXES, gathered_specs

ROWS, LENGTH, EXPERTS, ASKED, WIDTH, HIDDEN = 2, 12, 6, 2, 8, 5
TOKENS = ROWS * LENGTH


def make_inputs(chosen=None):
    """Expert 5 is asked by every token and expert 3 by none, unless the choice is given."""
    random = np.random.default_rng(0)
    shapes = ((ROWS, LENGTH, WIDTH), (EXPERTS, WIDTH, 2 * HIDDEN), (EXPERTS, HIDDEN, WIDTH), (ROWS, LENGTH, ASKED))
    arrays = tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)
    if chosen is None:
        chosen = np.stack([random.choice([0, 1, 2, 4], (ROWS, LENGTH)), np.full((ROWS, LENGTH), 5)], axis=-1)
    return arrays, chosen


def plain_answers(x, gate_up, down, shares, chosen):
    """Every token with its own copy of its experts."""
    gate, up = jnp.split(jnp.einsum("ble,blaef->blaf", x, gate_up[chosen]), 2, axis=-1)
    return jnp.einsum("blaf,blafe,bla->ble", jax.nn.gelu(gate, approximate=True) * up, down[chosen], shares)


def value_and_gradients(ask, arrays, chosen):
    """Answers, and gradients to x and shares."""
    x, gate_up, down, shares = arrays
    weights = np.random.default_rng(1).standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
    answers, backward = jax.vjp(lambda x, shares: ask(x, gate_up, down, shares, chosen), x, shares)
    return answers, *backward(jnp.asarray(weights, answers.dtype))


# Blocks of 4 rows: experts have several blocks, and some a part of one; of 64: one holds all.
@pytest.mark.parametrize(
    ("chosen", "rows"),
    [
        pytest.param(None, 4, id="uneven-4"),
        pytest.param(np.full((ROWS, LENGTH, ASKED), 0), 4, id="first-4"),
        pytest.param(np.full((ROWS, LENGTH, ASKED), 5), 4, id="last-4"),
        pytest.param(None, 64, id="uneven-64"),
        pytest.param(np.full((ROWS, LENGTH, ASKED), 0), 64, id="first-64", marks=pytest.mark.slow),
        pytest.param(np.full((ROWS, LENGTH, ASKED), 5), 64, id="last-64", marks=pytest.mark.slow),
    ],
)
def test_answers_and_gradients_are_those_of_one_token_after_the_other(monkeypatch, rows, chosen):
    monkeypatch.setitem(module.ROWS, "cpu", rows)
    arrays, chosen = make_inputs(chosen)
    expected = value_and_gradients(plain_answers, arrays, chosen)
    for array, reference in zip(
        jax.jit(lambda: value_and_gradients(mixture_of_experts, arrays, jnp.asarray(chosen)))(), expected, strict=True
    ):
        assert np.abs(array - reference).max() < 1e-5 * np.abs(reference).max()


def test_experts_have_a_gradient_where_one_is_asked_for():
    (x, *experts, shares), chosen = make_inputs()
    chosen = jnp.asarray(chosen)

    @partial(jax.jit, static_argnums=0)
    def gradients(ask, *experts):
        return jax.grad(lambda *experts: jnp.sin(ask(x, *experts, shares, chosen)).sum(), argnums=(0, 1))(*experts)

    for array, reference in zip(
        gradients(mixture_of_experts, *experts), gradients(plain_answers, *experts), strict=True
    ):
        assert np.abs(array - reference).max() < 1e-5 * np.abs(reference).max()


def test_frozen_experts_cost_no_products_for_gradients_of_their_own():
    assert lowered("tpu").count('"chlo.ragged_dot"(') == 4
    arrays, chosen = make_inputs()
    jaxpr = jax.make_jaxpr(lambda *arrays: value_and_gradients(mixture_of_experts, arrays, jnp.asarray(chosen)))(
        *arrays
    )
    assert "rhs_group_dimensions=[]" not in str(jaxpr)


def test_bfloat16_answers_are_close_to_float32():
    arrays, chosen = make_inputs()
    fine, coarse = (
        jax.jit(mixture_of_experts)(*(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(chosen))
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert coarse.dtype == jnp.bfloat16
    assert np.linalg.norm(coarse.astype(jnp.float32) - fine) < 0.01 * np.linalg.norm(fine)


def lowered(platform):
    arrays, chosen = make_inputs()
    traced = jax.jit(lambda *arrays: value_and_gradients(mixture_of_experts, arrays, jnp.asarray(chosen))).trace(
        *arrays
    )
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_work_does_not_grow_with_the_experts_that_are_not_asked(platform):
    text = lowered(platform)
    assert "ragged_dot" not in text
    assert f"{EXPERTS}x{TOKENS * ASKED}x" not in text


def test_tpus_have_their_own_products_forward_and_back():
    text = lowered("tpu")
    assert text.count('"chlo.ragged_dot"(') == 4
    assert "stablehlo.while" not in text


def test_ragged_products_are_the_same_as_those_in_blocks(monkeypatch):
    monkeypatch.setitem(module.ROWS, "cpu", 4)
    (x, gate_up, _, _), _ = make_inputs()
    loads = jnp.array([3, 0, 9, 1, 4, 7])
    x = x.reshape(-1, WIDTH)
    for rows, transposed in ((x, False), (x @ gate_up[0], True)):
        blocks, ragged = (
            make(rows, gate_up, loads, transposed=transposed)
            for make in (module._block_products, module._ragged_products)
        )
        assert np.abs(blocks - ragged).max() < 1e-5


@pytest.mark.slow
def test_devices_that_share_the_experts_and_the_tokens_give_the_same():
    """In a process of its own, since this one has a single device."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


def test_tp_splits_the_experts_of_a_layer():
    """Of 8 experts with tp 2, each device gets 4 and multiplies with these, as the plan counts on."""
    variant, mesh = find_variant("tiny-26b-a4b"), AbstractMesh((1, 2, 1, 2), AXES)
    specs = {path[-1]: spec for path, (spec, _) in gathered_specs(variant, 0, mesh=mesh).items() if "experts" in path}
    assert specs == dict.fromkeys(("gate_up_proj", "down_proj"), PartitionSpec("tp", None, None))
    x, shares, chosen = jnp.zeros((2, 8, variant.embed_dim)), jnp.ones((2, 8, 2)), jnp.zeros((2, 8, 2), jnp.int32)
    text = str(jax.make_jaxpr(partial(Experts(variant, dtype=jnp.dtype("float32")), mesh=mesh))(x, shares, chosen))
    assert (
        f"f32[4,{variant.embed_dim},{2 * variant.expert_ffn}]" in text
        and f"f32[4,{variant.expert_ffn},{variant.embed_dim}]" in text
    )


def main():
    arrays, chosen = make_inputs()
    expected = value_and_gradients(plain_answers, arrays, chosen)
    for sizes in ((1, 2, 2, 2), (1, 2, 1, 3), (1, 1, 2, 4)):  # with tp 4, every device holds all 6 experts
        mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: np.prod(sizes)])
        ask = partial(mixture_of_experts, mesh=mesh)
        actual = jax.jit(lambda ask=ask: value_and_gradients(ask, arrays, jnp.asarray(chosen)))()
        for array, reference in zip(actual, expected, strict=True):
            assert np.abs(array - reference).max() < 1e-5 * np.abs(reference).max()


if __name__ == "__main__":
    main()
