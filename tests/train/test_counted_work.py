"""The formulas count the FLOPs that the traced step of the JAX backend has, so that the two cannot drift apart."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.hardware.model import memory_of, on_chips, step_cost
from gemsmith.hardware.model.step_time import attention_flops, matmul_flops
from gemsmith.models.sharding import AXES
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Mesh
from gemsmith.train.jax.backend import adapted_model
from gemsmith.train.jax.step import input_shapes, make_optimizer, make_step

ROWS, LENGTH = 2, 512


def dot_flops(jaxpr) -> float:
    """2 M N K of every matmul in a jaxpr, those in a loop as often as it runs."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        assert equation.primitive.name != "while", "a loop of unknown length"
        total += times * sum(dot_flops(inner) for inner in jaxprs_in_params(equation.params))
    return total


@pytest.fixture
def stepped(tiny_checkpoint):
    def make(variant: str, **train):
        """The adapted model of a recipe, its step on one CPU, and the work that the formulas see."""
        folder = tiny_checkpoint(variant)
        recipe = build_recipe({
            "checkpoint": str(folder),
            "data": {"train": {"task": "verilog", "rows": 1}, "max_length": LENGTH},
            "lora": {} if train.get("method") == "full" else {"rank": 8, "dropout": 0.0},
            "train": {"global_batch_size": ROWS, "dtype": "float32", **train},
        })  # fmt: skip
        mesh = jax.make_mesh((1,) * 4, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4, devices=jax.devices()[:1])
        checkpoint = open_checkpoint(str(folder))
        model = adapted_model(recipe, checkpoint, mesh)
        optimizer = nnx.Optimizer(model, make_optimizer(recipe.optimizer), wrt=nnx.LoRAParam)
        lora = None if recipe.train.method == "full" else recipe.lora
        step = make_step(model, optimizer, lora=lora, seed=0)
        return model, step, on_chips(step_cost(recipe, checkpoint.variant), "cpu", recipe)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "remat", "optimizations"),
    [
        ("tiny-31b", "none", "auto"),
        ("tiny-12b", "layer", "auto"),
        ("tiny-31b", ("o", "down", "attended", "lora"), "auto"),
        ("tiny-31b", ("o", "down", "attended", "lora"), "off"),
        ("tiny-e2b", ("q", "k", "v", "gate", "up"), "auto"),
    ],
)
def test_the_formulas_count_the_flops_and_bytes_of_the_step(stepped, variant, remat, optimizations):
    model, step, work = stepped(variant, remat=remat, optimizations=optimizations)
    inputs = input_shapes(model.execution.mesh, rows=ROWS, length=LENGTH)
    traced = step.update.trace(step.trained, step.moments, step.frozen, inputs)
    assert dot_flops(traced.jaxpr.jaxpr) == pytest.approx(matmul_flops(work) + attention_flops(work), rel=0.01)

    memory = memory_of(replace(work, rows=1), Mesh())
    assert size_of(step.frozen) == memory.base
    assert 4 * size_of(step.trained) == memory.adapters, "parameter, gradient and two moments"
    if remat != "none":  # there XLA makes one loop of much that JAX saves
        assert saved_bytes(model) == pytest.approx(memory.saved, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "remat"), [("tiny-31b", "none"), ("tiny-e2b", "layer")])
def test_the_formulas_count_the_flops_and_bytes_of_a_step_of_all_weights(stepped, variant, remat):
    model, step, work = stepped(variant, remat=remat, method="full")
    inputs = input_shapes(model.execution.mesh, rows=ROWS, length=LENGTH)
    traced = step.update.trace(step.trained, step.moments, step.frozen, inputs)
    assert dot_flops(traced.jaxpr.jaxpr) == pytest.approx(matmul_flops(work) + attention_flops(work), rel=0.01)
    memory = memory_of(replace(work, rows=1), Mesh())
    assert memory.base == 0 and 4 * size_of(step.trained) == memory.adapters
    assert size_of(step.frozen) == 4 * work.variant.layers, "the layers' scalars"


def saved_bytes(model) -> int:
    """What the layers of one row save for the backward pass: all that the scans over layers stack up, beside their
    carry."""
    graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    row = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)

    def backward(trained, frozen, tokens):
        return jax.vjp(lambda trained: nnx.merge(graph, trained, frozen).hidden(tokens, tokens, tokens), trained)[1]

    jaxpr = jax.make_jaxpr(backward)(trained, frozen, row).jaxpr
    scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    stacked = {value for scan in scans for value in scan.outvars[scan.params["num_carry"] :]}
    return sum(size_of(value.aval) for value in set(jaxpr.outvars) & stacked)


def size_of(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
