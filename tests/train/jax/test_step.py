import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gemsmith.arch import find_variant
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.models import Execution, abstract_model
from gemsmith.models.sharding import AXES
from gemsmith.train.jax.backend import adapted_model
from gemsmith.train.jax.distributed import place
from gemsmith.train.jax.lora import add_adapters
from gemsmith.train.jax.step import input_shapes, make_optimizer, make_step, shard_opt_state

ROWS, LENGTH = 2, 32


@pytest.fixture(scope="module")
def mesh(small_checkpoint):
    return jax.make_mesh((1,) * 4, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4, devices=jax.devices()[:1])


@pytest.fixture
def make(small_recipe, small_checkpoint, mesh):
    """Returns the step of a recipe: `make(lora={"dropout": 0.5})`."""

    def build(**sections):
        recipe = small_recipe(**sections)
        model = adapted_model(recipe, open_checkpoint(str(small_checkpoint)), mesh)
        optimizer = nnx.Optimizer(model, make_optimizer(recipe.optimizer), wrt=nnx.LoRAParam)
        nnx.update(optimizer, shard_opt_state(nnx.state(optimizer), model))
        return make_step(model, optimizer, lora=recipe.lora, seed=recipe.seed)

    return build


def make_inputs(mesh, step=1, rate=0.1, **changed):
    random = np.random.default_rng(0)
    tokens = random.integers(108, 1024, (ROWS, LENGTH))
    values = {
        "tokens": tokens,
        "segments": np.ones_like(tokens),
        "positions": np.tile(np.arange(LENGTH), (ROWS, 1)),
        "loss_mask": np.arange(LENGTH) % 3 == 2,
        "learning_rate": rate,
        "step": step,
        "skip_above": np.inf,
        "stop": np.zeros(mesh.size),
    } | changed
    values["loss_mask"] = np.broadcast_to(values["loss_mask"], tokens.shape)
    return {name: place(values[name], shape) for name, shape in input_shapes(mesh, rows=ROWS, length=LENGTH).items()}


def run(step, inputs, trained=None):
    """The adapters after one update, and its metrics; the step's own state stays usable."""
    trained, moments = jax.tree.map(jnp.copy, (trained or step.trained, step.moments))
    trained, _, metrics = step.update(trained, moments, step.frozen, inputs)
    return trained, {name: float(value) for name, value in metrics.items()}


@pytest.mark.slow
def test_dropout_is_a_function_of_the_step_and_is_drawn_for_training_only(make, mesh):
    dropping, still = make(lora={"dropout": 0.5}), make(lora={"dropout": 0.0})
    # B = 0 hides A: only after an update do masks change the loss, though they change the gradient of B from the first.
    norms = [run(dropping, make_inputs(mesh, step=step))[1]["grad_norm"] for step in (1, 1, 2)]
    assert norms[0] == norms[1] != norms[2]
    trained, metrics = run(still, make_inputs(mesh))
    assert metrics["grad_norm"] not in norms
    losses = [run(dropping, make_inputs(mesh, step=step), trained)[1]["loss"] for step in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_rematerialised_layers_draw_the_masks_that_the_first_pass_drew(make, mesh):
    inputs = make_inputs(mesh, rate=1e-3)
    trained, metrics = run(make(lora={"dropout": 0.5}, train={"remat": "none"}), inputs)
    for remat in ("layer", ["down", "lora"], ["o", "down", "lora"]):
        trained_again, metrics_again = run(make(lora={"dropout": 0.5}, train={"remat": remat}), inputs)
        assert metrics == pytest.approx(metrics_again, rel=1e-5)
        for plain, again in zip(jax.tree.leaves(trained), jax.tree.leaves(trained_again), strict=True):
            np.testing.assert_allclose(plain, again, atol=1e-6)


@pytest.mark.slow
def test_a_bfloat16_base_trains_float32_adapters(make, mesh):
    step = make(train={"dtype": "bfloat16"})
    trained, metrics = run(step, make_inputs(mesh, rate=1e-5))
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(step.moments) if leaf.ndim} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(step.frozen)} == {jnp.dtype("bfloat16")}
    assert 0 < metrics["loss"] < 10


@pytest.mark.parametrize(("limits", "skipped"), [((1.0, 99.0), True), ((99.0, 1e-3), True), ((99.0, 99.0), False)])
def test_a_step_above_one_of_its_limits_leaves_the_adapters_as_they_were(make, mesh, limits, skipped):
    step = make(lora={"targets": ["q"]})
    trained, metrics = run(step, make_inputs(mesh, skip_above=limits))
    assert bool(metrics["skipped"]) == skipped and metrics["loss"] > 1.0 > metrics["grad_norm"] > 1e-3
    pairs = zip(jax.tree.leaves(step.trained), jax.tree.leaves(trained), strict=True)
    assert all((old == new).all() for old, new in pairs) == skipped


@pytest.mark.slow
def test_rows_count_by_their_tokens(make, mesh):
    """The step's loss is the mean over its tokens, however they lie in rows; rows of padding change nothing."""
    step = make(lora={"dropout": 0.0})
    tokens = np.random.default_rng(0).integers(108, 1024, (ROWS, LENGTH))
    mask = np.zeros((ROWS, LENGTH), bool)
    mask[0, 5:25], mask[1, 5] = True, True
    segments = np.ones((ROWS, LENGTH), int)
    both = run(step, make_inputs(mesh, loss_mask=mask))[1]["loss"]
    first, second = (
        run(step, make_inputs(mesh, loss_mask=mask & (np.arange(ROWS) == row)[:, None]))[1]["loss"] for row in (0, 1)
    )
    assert both == pytest.approx((20 * first + second) / 21, rel=1e-6)
    tokens[1], segments[1] = 0, 0
    alone = run(step, make_inputs(mesh, tokens=tokens, segments=segments, loss_mask=mask & (segments > 0)))[1]["loss"]
    assert alone == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_products_of_float32_are_not_rounded_on_any_chip(make, mesh, dtype, precision):
    """By JAX's default TPUs round what goes into them to bfloat16, and GPUs to TF32."""
    step, inputs = make(train={"dtype": dtype}), make_inputs(mesh)
    rows = {name: inputs[name] for name in ("tokens", "segments", "positions", "loss_mask")}
    for lowered in (
        step.update.lower(step.trained, step.moments, step.frozen, inputs),
        step.evaluate.lower(step.trained, step.frozen, rows),
        step.next_tokens.lower(step.trained, step.frozen, rows),
    ):
        products = re.findall(r"dot_general .*precision = \[(\w+), (\w+)\]", lowered.as_text())
        assert len(products) > 10 and {each for pair in products for each in pair} == {precision}


@pytest.mark.slow
def test_the_step_of_absent_weights_can_be_lowered(mesh, small_recipe):
    """What a plan compiles for chips that do not exist; no callback to the host is in it."""
    recipe, variant = small_recipe(), find_variant("tiny-e2b")
    base = abstract_model(variant, dtype=jnp.bfloat16, execution=Execution(remat="layer", mesh=mesh))
    model = add_adapters(base, variant, recipe.lora, seed=0)
    optimizer = nnx.eval_shape(partial(nnx.Optimizer, tx=make_optimizer(recipe.optimizer), wrt=nnx.LoRAParam), model)
    nnx.update(optimizer, shard_opt_state(nnx.state(optimizer), model))
    step = make_step(model, optimizer, lora=recipe.lora, seed=0)
    text = step.update.lower(
        step.trained, step.moments, step.frozen, input_shapes(mesh, rows=ROWS, length=LENGTH)
    ).as_text()
    assert "callback" not in text and "dot_general" in text
    assert len(jax.tree.leaves(step.moments)) == 2 + 2 * len(jax.tree.leaves(step.trained))
