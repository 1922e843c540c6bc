import itertools
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from gemsmith.arch import Variant
from gemsmith.models import Execution, abstract_model, token_nll
from gemsmith.models import loss as module
from gemsmith.models.sharding import AXES, BATCH, WEIGHTS
from gemsmith.recipe.backends import PLAIN, TUNED

VARIANT = Variant(
    name="two-layers", layers=2, global_every=2, embed_dim=16, ffn=32, heads=2, kv_heads=1, global_kv_heads=1,
    head_dim=8, global_head_dim=16, sliding_window=8, attention_k_eq_v=True, vocabulary=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    random = np.random.default_rng(0)
    graph, state = nnx.split(abstract_model(VARIANT, dtype=jnp.float32))
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.2, x.shape), x.dtype), state))


def make_batch(shape=(2, 21)):
    random = np.random.default_rng(0)
    hidden = random.standard_normal((*shape, VARIANT.embed_dim)).astype(np.float32)
    return hidden, random.integers(0, VARIANT.vocabulary, shape), random.integers(0, 2, shape).astype(np.uint8)


def whole_nll(model, hidden, tokens, mask):
    log_p = jax.nn.log_softmax(model.logits(hidden[:, :-1]))
    return -(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0] * mask[:, 1:]).sum()


@pytest.mark.parametrize("chunk", [4, 20, 256])
def test_the_loss_in_chunks_equals_the_loss_of_whole_rows(model, chunk):
    hidden, tokens, mask = make_batch()
    total, gradient = jax.jit(jax.value_and_grad(lambda x: token_nll(model, x, tokens, mask, chunk=chunk)[0]))(hidden)
    expected, expected_gradient = jax.jit(jax.value_and_grad(lambda x: whole_nll(model, x, tokens, mask)))(hidden)
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    assert token_nll(model, hidden, tokens, mask)[1] == mask[:, 1:].sum()


@pytest.mark.parametrize(("rows", "shape"), [(1, (3, 1, 8, 16)), (2, (6, 2, 4, 16)), (16, (21, 16, 1, 16))])
def test_a_chunk_has_so_many_tokens_of_all_rows_together(rows, shape):
    assert module._in_chunks(jnp.zeros((rows, 21, 16)), None, 8).shape == shape


def test_tokens_with_the_highest_logit_are_correct_in_chunks_and_under_the_gradient(model):
    hidden, tokens, mask = make_batch()
    best = np.asarray(model.logits(hidden[:, :-1]).argmax(-1))
    tokens[:, 1:12] = best[:, :11]  # what it would say itself
    expected = ((best == tokens[:, 1:]) * mask[:, 1:]).sum()
    assert 5 < expected < mask[:, 1:].sum()

    def nll(hidden):
        total, _, correct = token_nll(model, hidden, tokens, mask, chunk=4)
        return total, correct

    assert token_nll(model, hidden, tokens, mask)[2] == jax.grad(nll, has_aux=True)(hidden)[1] == expected


def test_each_target_is_predicted_from_the_position_before_it():
    """A model that puts all its weight on the word that its hidden state names: right only one step ahead."""
    tokens = np.array([[5, 3, 7, 1]])
    table = SimpleNamespace(embedding=100 * jnp.eye(8))
    model = SimpleNamespace(execution=Execution(), variant=replace(VARIANT, softcap=0.0), embed_tokens=table)
    hidden = np.eye(8, dtype=np.float32)[[[3, 7, 1, 0]]]
    total, count, correct = token_nll(model, hidden, tokens, np.array([[0, 1, 0, 1]]))
    assert (float(total), float(count), float(correct)) == (0, 2, 2)
    wrong, *_ = token_nll(model, hidden, tokens % 7 + 1, np.array([[0, 1, 0, 1]]))
    assert wrong >= 100


def test_rows_without_targets_count_nothing(model):
    hidden, tokens, mask = make_batch()
    total, count, correct = token_nll(model, hidden, tokens, np.zeros_like(mask))
    assert (float(total), float(count), float(correct)) == (0, 0, 0)


def test_logits_of_a_whole_row_never_exist(model):
    hidden, tokens, mask = make_batch()
    step = jax.grad(lambda hidden: token_nll(model, hidden, tokens, mask, chunk=4)[0])
    assert largest_size(jax.make_jaxpr(step)(hidden).jaxpr) < hidden.shape[0] * hidden.shape[1] * VARIANT.vocabulary


def largest_size(jaxpr):
    """The most elements that any value has, those inside loops and checkpoints too."""
    sizes = [variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars]
    return max([*sizes, *(largest_size(inner) for inner in jax.extend.core.subjaxprs(jaxpr))], default=0)


@pytest.mark.slow
def test_devices_that_share_the_vocabulary_or_the_rows_give_the_same():
    """In a process of its own, since this one has a single device."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


def test_the_vocabulary_is_split_where_hidden_states_are_fewer_bytes():
    def splits(tokens, dtype="bfloat16", sizes=(1, 4, 1, 1)):
        mesh, embedding = AbstractMesh(sizes, AXES), jax.ShapeDtypeStruct((64, 16), dtype)
        return module._splits_vocabulary(embedding, jax.ShapeDtypeStruct((4, tokens // 4, 16), dtype), mesh)

    assert splits(20) and not splits(24), "6 bytes of a hidden state's number, 2 of a word's"
    assert splits(40, sizes=(2, 2, 1, 1)) and splits(20, sizes=(1, 1, 4, 1)) and splits(20, sizes=(1, 2, 1, 2))
    assert not splits(4, "float32") and not splits(4, sizes=(4, 1, 1, 1)) and not splits(4, sizes=(1, 3, 1, 1))


def main():
    """What four devices come to, tuned with the vocabulary split over them and plain, is what one comes to."""
    words = np.random.default_rng(1).normal(0, 0.2, (VARIANT.vocabulary, VARIANT.embed_dim)).astype(np.float32)
    hidden, tokens, mask = make_batch((4, 12))
    whole = SimpleNamespace(variant=VARIANT, execution=Execution(), embed_tokens=SimpleNamespace(embedding=words))
    best = np.argmax(hidden[:, :-1] @ words.T, axis=-1)
    tokens[:, 1:6] = best[:, :5]
    expected, expected_gradient = jax.value_and_grad(lambda x: token_nll(whole, x, tokens, mask)[0])(hidden)
    module._splits_vocabulary = lambda *_: True
    for splits, sizes in itertools.product((True, False), ((1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (1, 2, 1, 2))):
        optimizations = TUNED if splits else PLAIN
        mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4)
        table = jax.device_put(words, NamedSharding(mesh, PartitionSpec("tp", WEIGHTS)))
        rows = NamedSharding(mesh, PartitionSpec(BATCH, "sequence"))

        def nll(hidden, table, tokens, mask, mesh=mesh, optimizations=optimizations):
            execution, embedding = Execution(mesh=mesh, optimizations=optimizations), SimpleNamespace(embedding=table)
            split = SimpleNamespace(variant=VARIANT, execution=execution, embed_tokens=embedding)
            total, _, correct = token_nll(split, hidden, tokens, mask, chunk=8)
            return total, correct

        laid_out, *others = jax.device_put((hidden, tokens, mask), rows)
        run = jax.jit(jax.value_and_grad(nll, has_aux=True)).lower(laid_out, table, *others).compile()
        (total, correct), gradient = run(laid_out, table, *others)
        assert correct == ((best == tokens[:, 1:]) * mask[:, 1:]).sum() > 5
        assert float(total) == pytest.approx(float(expected), rel=1e-6), (splits, sizes)
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
        gathers_words = f"f32[{VARIANT.vocabulary // sizes[3]},{VARIANT.embed_dim}]" in run.as_text()
        assert gathers_words != splits, (splits, sizes)


if __name__ == "__main__":
    main()
