from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gemsmith.arch import Variant
from gemsmith.models import Execution, SoftTokens, abstract_model
from gemsmith.recipe.schema import Lora
from gemsmith.train.jax.lora import add_adapters

# Blocks of two layers, of which the last shares kv, with per-layer inputs and K = V, which no published variant has all
# of.
VARIANT = Variant(
    name="odd", layers=5, global_every=2, embed_dim=16, ffn=32, heads=2, kv_heads=1, global_kv_heads=1, head_dim=8,
    global_head_dim=16,
    sliding_window=4, attention_k_eq_v=True, per_layer_input=4, kv_shared_layers=1, wide_shared_mlp=True, vocabulary=64,
)  # fmt: skip
WITH_EXPERTS = replace(VARIANT, layers=1, kv_shared_layers=0, experts=4, experts_per_token=2, expert_ffn=8)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12))
INPUTS = (TOKENS, np.broadcast_to(np.arange(12), (2, 12)), np.ones((2, 12), int))


def make_model(variant=VARIANT):
    """A model whose weights come from numpy: nothing to compile."""
    random = np.random.default_rng(0)
    graph, state = nnx.split(abstract_model(variant, dtype=jnp.float32))
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(random.normal(0.2, 0.3, x.shape), x.dtype), state))


@partial(jax.jit, static_argnums=0)
def run_graph(graph, state, *inputs):
    return nnx.merge(graph, state)(*inputs)


def run(model, *inputs):
    return run_graph(*nnx.split(model), *inputs)


@pytest.fixture(scope="module")
def adapted():
    """A model with adapters whose B is not 0."""
    model = add_adapters(make_model(), VARIANT, Lora(rank=2, alpha=4, dropout=0.0), seed=0)
    nnx.update(model, jax.tree.map(lambda x: jnp.full_like(x, 0.1), nnx.state(model, nnx.LoRAParam)))
    return model


@pytest.mark.slow
def test_adapters_act_in_hidden_and_in_the_logits_alike(adapted):
    logits = run(adapted, *INPUTS)
    hidden = nnx.jit(type(adapted).hidden)(adapted, *INPUTS)
    np.testing.assert_allclose(logits, adapted.logits(hidden), atol=1e-5)
    assert np.abs(logits - run(make_model(), *INPUTS)).max() > 1e-2


def test_a_bf16_base_with_fp32_adapters_stays_bf16_between_layers():
    base = abstract_model(VARIANT, dtype=jnp.bfloat16)
    graph, state = nnx.split(add_adapters(base, VARIANT, Lora(rank=2, alpha=4), seed=0))
    hidden = jax.eval_shape(lambda state: nnx.merge(graph, state).hidden(*INPUTS), state)
    logits = jax.eval_shape(lambda state: nnx.merge(graph, state)(*INPUTS), state)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


def test_logits_stay_below_the_softcap():
    model = make_model()
    hidden = 1e3 * jnp.ones((1, 1, VARIANT.embed_dim))
    assert np.abs(model.logits(hidden)).max() <= VARIANT.softcap
    small = 1e-3 * jnp.ones((1, 1, VARIANT.embed_dim))
    np.testing.assert_allclose(model.logits(small), small @ model.embed_tokens.embedding[...].T, rtol=1e-5, atol=1e-9)


def test_a_token_sees_nothing_after_it_and_nothing_of_another_document():
    model = make_model()
    tokens, positions, _ = INPUTS
    segments = np.repeat([[1, 2]], [7, 5], axis=1).repeat(2, axis=0)
    changed = tokens.copy()
    changed[:, [3, 9]] = (changed[:, [3, 9]] + 1) % 64
    before, after = (run(model, t, positions, segments) for t in (tokens, changed))
    moved = np.abs(np.asarray(before) - np.asarray(after)).max(axis=(0, 2)) > 1e-6
    assert moved.tolist() == [False] * 3 + [True] * 4 + [False] * 2 + [True] * 3


def test_each_token_gets_its_own_experts_answers():
    """Against every expert computed for every token, weighted by its share."""
    layer = make_model(WITH_EXPERTS).layers[0]
    graph, state = nnx.split(layer.experts)
    experts = nnx.merge(graph, jax.tree.map(lambda stack: stack[0], state))
    random = np.random.default_rng(0)
    x, shares = random.standard_normal((9, 16)).astype(np.float32), random.random((9, 2)).astype(np.float32)
    chosen = np.array([random.permutation(3)[:2] for _ in range(9)])  # the last expert gets no token
    gate, up = np.split(np.einsum("ne,xef->nxf", x, experts.gate_up_proj[...]), 2, axis=-1)
    everyone = np.einsum("nxf,xfe->nxe", jax.nn.gelu(gate, approximate=True) * up, experts.down_proj[...])
    expected = (np.take_along_axis(everyone, chosen[..., None], axis=1) * shares[..., None]).sum(axis=1)
    np.testing.assert_allclose(experts(x[None], shares[None], chosen[None], mesh=None)[0], expected, atol=1e-5)


def make_images(embeddings, spans=None):
    """An image of three tokens at 4 to 6 of the first row; the second row has one of two at 0 and 1, and an unused
    place."""
    spans = np.zeros((2, 12), int) if spans is None else spans
    return SoftTokens(
        embeddings=jnp.asarray(embeddings), places=jnp.array([[4, 5, 6], [0, 1, 12]]), blocks=jnp.asarray(spans)
    )


def test_a_image_that_is_embedded_as_words_are_reads_as_those_words():
    """Without per-layer inputs, nothing else tells a word from an image."""
    model = make_model(replace(VARIANT, per_layer_input=0))
    table = np.asarray(model.embed_tokens.embedding[...])
    words = np.array([[7, 8, 9], [10, 11, 12]])
    there = TOKENS.copy()
    there[0, 4:7], there[1, :2] = words[0], words[1, :2]
    seen = run(model, *INPUTS, make_images(table[words] * 4.0))  # sqrt(16)
    np.testing.assert_allclose(seen, run(model, there, *INPUTS[1:]), atol=1e-5)
    assert np.abs(seen - run(model, *INPUTS)).max() > 1e-2


def test_per_layer_inputs_of_a_image_are_those_of_token_0_and_of_its_own_embedding():
    model = make_model()
    table, width = np.asarray(model.embed_tokens.embedding[...]), VARIANT.per_layer_input
    embeddings = np.random.default_rng(1).standard_normal((2, 3, 16)).astype(np.float32)
    embedded, identities = model._embed(jnp.asarray(TOKENS), make_images(embeddings))
    per_layer = model._per_layer_inputs(identities, embedded)
    expected_tokens, expected_embedded = TOKENS.copy(), table[TOKENS] * 4.0
    expected_tokens[0, 4:7] = expected_tokens[1, :2] = 0
    expected_embedded[0, 4:7], expected_embedded[1, :2] = embeddings[0], embeddings[1, :2]
    np.testing.assert_allclose(embedded, expected_embedded, rtol=1e-6)
    identity = (
        np.asarray(model.embed_tokens_per_layer.embedding[...])[expected_tokens].reshape(2, 12, 5, width) * width**0.5
    )
    context = expected_embedded @ np.asarray(model.per_layer_model_projection.kernel[...]) * 16**-0.5
    context = context.reshape(2, 12, 5, width)
    norm = context / np.sqrt((context**2).mean(-1, keepdims=True) + VARIANT.rms_eps)
    norm *= np.asarray(model.per_layer_projection_norm.weight[...])
    np.testing.assert_allclose(np.moveaxis(np.asarray(per_layer), 0, 2), (norm + identity) * 2**-0.5, atol=1e-5)


@pytest.mark.parametrize("both_ways", [True, False])
def test_tokens_of_a_image_see_each_other_where_the_variant_says_so(both_ways):
    model = make_model(replace(VARIANT, bidirectional_images=both_ways))
    embeddings = np.random.default_rng(1).standard_normal((2, 3, 16)).astype(np.float32)
    changed = embeddings.copy()
    changed[0, 2] += 1
    spans = np.zeros((2, 12), int)
    spans[0, 4:7], spans[1, :2] = 1, 1
    before, after = (run(model, *INPUTS, make_images(e, spans)) for e in (embeddings, changed))
    moved = np.abs(np.asarray(before) - np.asarray(after)).max(axis=2) > 1e-6
    assert moved[0].tolist() == [False] * 4 + [both_ways] * 2 + [True] * 6
    assert not moved[1].any()


@pytest.mark.parametrize(
    ("remat", "kept", "turns"),
    [("layer", 2, [True] * 2), (("down",), 2 + 2, [True] * 2), (("o", "down"), 1 + 2 + 2, [False])],
)
def test_where_o_and_down_are_kept_so_is_of_a_blocks_inputs_only_the_first(remat, kept, turns):
    """Of two blocks of two layers, the forward loop hands on arrays of hidden's shape, one entry a block: inputs, o's,
    down's. Layers that have inputs of their own are recomputed in turn.
    """
    variant = replace(VARIANT, layers=4, kv_shared_layers=0, per_layer_input=0)
    base = abstract_model(variant, dtype=jnp.float32, execution=Execution(remat=remat))
    graph, trained, frozen = nnx.split(add_adapters(base, variant, Lora(rank=2), seed=0), nnx.LoRAParam, ...)

    def loss(trained, frozen):
        return nnx.merge(graph, trained, frozen).hidden(*INPUTS).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(trained, frozen)
    loops = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert len(loops) == 2
    assert [variable.aval.shape for variable in loops[0].outvars].count((2, 2, 12, variant.embed_dim)) == kept
    again = [equation.params for equation in loops[1].params["jaxpr"].eqns if "prevent_cse" in equation.params]
    assert [each["prevent_cse"] for each in again] == turns


@pytest.mark.slow
def test_layers_whose_inputs_are_made_again_have_the_same_gradients():
    """Shared keys and values go from layer to layer too."""
    variant = replace(VARIANT, per_layer_input=0)
    model = add_adapters(make_model(variant), variant, Lora(rank=2, alpha=4, dropout=0.0), seed=0)
    nnx.update(model, jax.tree.map(lambda x: jnp.full_like(x, 0.1), nnx.state(model, nnx.LoRAParam)))
    graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)

    def gradients(remat):
        def loss(trained, frozen):
            model = nnx.merge(graph, trained, frozen)
            model.execution = Execution(remat=remat)
            return jnp.square(model.hidden(*INPUTS)).mean()

        return jax.tree.leaves(jax.jit(jax.grad(loss))(trained, frozen))

    for plain, again in zip(gradients("none"), gradients(("o", "down", "lora")), strict=True):
        assert np.abs(plain).max() > 0
        np.testing.assert_allclose(again, plain, rtol=1e-5, atol=1e-6 * np.abs(plain).max())
