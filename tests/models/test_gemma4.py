import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from gemsmith.models import Gemma4, path_of, token_nll
from gemsmith.zoo import Variant, find_variant, lora_targets

# Qwix 0.1.8 uses names of nnx that flax 0.12.8 deprecates.
_DEPRECATED = ("The 'm.", "'VariableState' was removed", "'.value' access is now deprecated")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}:DeprecationWarning") for message in _DEPRECATED]

ADAPTED = r"layers/\d+/(self_attn|mlp)/(q|k|v|o|gate|up|down)_proj"
# Three layers with per-layer inputs, shared kv and K = V, which no published variant has all of.
VARIANT = Variant(
    name="odd", layers=3, global_every=2, hidden=16, ffn=32, heads=2, kv_heads=1, global_kv_heads=1, head_dim=8, global_head_dim=16,
    sliding_window=4, k_is_v=True, per_layer_input=4, kv_shared_layers=1, wide_shared_mlp=True, vocabulary=64,
)  # fmt: skip
WITH_EXPERTS = replace(VARIANT, layers=1, kv_shared_layers=0, experts=4, experts_per_token=2, expert_ffn=8)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12))
INPUTS = (TOKENS, np.broadcast_to(np.arange(12), (2, 12)), np.ones((2, 12), int))


def abstract_model(dtype=jnp.float32, variant=VARIANT):
    return nnx.eval_shape(lambda: Gemma4(variant, dtype=dtype, rngs=nnx.Rngs(0)))


def make_model(variant=VARIANT):
    """A model whose weights come from numpy: nothing to compile."""
    random = np.random.default_rng(0)
    graph, state = nnx.split(abstract_model(variant=variant))
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(random.normal(0.2, 0.3, x.shape), x.dtype), state))


@nnx.jit
def run(model, *inputs):
    return model(*inputs)


def inject(model, *, dropout=0.0, remat="none"):
    provider = qwix.LoraProvider(module_path=ADAPTED, rank=2, alpha=4, dropout=dropout)
    model.remat = remat
    return qwix.apply_lora_to_model(model, provider, *INPUTS, rngs=nnx.Rngs(1, dropout=2), methods=("hidden",))


def abstract_inject(*, dtype=jnp.float32, variant=VARIANT, remat="none"):
    return nnx.eval_shape(lambda: inject(Gemma4(variant, dtype=dtype, rngs=nnx.Rngs(0)), remat=remat))


@pytest.fixture(scope="module")
def adapted():
    """A model with adapters whose B is not 0."""
    model = nnx.jit(lambda model: inject(model, dropout=0.5))(make_model())
    nnx.update(model, jax.tree.map(lambda x: jnp.full_like(x, 0.1), nnx.state(model, nnx.LoRAParam)))
    return model


@nnx.jit
def loss_and_gradient(model):
    def loss(model):
        total, count = token_nll(model, model.hidden(*INPUTS), TOKENS, jnp.ones_like(TOKENS))
        return total / count

    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b"])
def test_qwix_adapts_exactly_the_zoos_targets(name):
    variant = find_variant(name)
    model = abstract_inject(variant=variant)
    shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    expected = {}
    for tensor in lora_targets(variant):
        *module, _ = path_of(tensor)
        expected[(*module, "kernel_lora_a")] = (tensor.shape[1], 2)
        expected[(*module, "kernel_lora_b")] = (2, tensor.shape[0])
    assert shapes == expected


def test_no_other_parameter_has_an_adapted_projections_path():
    for variant in (VARIANT, WITH_EXPERTS):
        paths = ["/".join(map(str, path[:-1])) for path, _ in nnx.to_flat_state(nnx.state(abstract_model(variant=variant)))]
        assert sum(re.fullmatch(ADAPTED, path) is not None for path in paths) == len(lora_targets(variant))


def test_adapters_whose_b_is_0_change_nothing():
    model = make_model()
    # Measured: 4e-7, from two programs compiled apart.
    np.testing.assert_allclose(run(nnx.jit(inject)(model), *INPUTS), run(model, *INPUTS), atol=1e-5)


def test_adapters_act_in_hidden_and_in_the_logits_alike(adapted):
    base = run(make_model(), *INPUTS)
    adapted.remat = "none"
    adapted.set_attributes(qwix_rngs=nnx.Rngs(0, dropout=0))
    logits = run(adapted, *INPUTS)
    adapted.set_attributes(qwix_rngs=nnx.Rngs(0, dropout=0))
    hidden = nnx.jit(type(adapted).hidden)(adapted, *INPUTS)
    np.testing.assert_allclose(logits, adapted.logits(hidden), atol=1e-5)
    assert np.abs(logits - base).max() > 1e-2


def test_remat_changes_neither_loss_nor_gradients_nor_dropout(adapted):
    results = []
    for remat in ("none", "layer"):
        adapted.remat = remat
        adapted.set_attributes(qwix_rngs=nnx.Rngs(0, dropout=3))
        results.append([loss_and_gradient(adapted), loss_and_gradient(adapted)])
    (plain, plain_again), (remat, remat_again) = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), plain, remat)
    assert float(plain_again[0]) == pytest.approx(float(remat_again[0]), rel=1e-6)
    # Dropout's next draw is another one.
    assert abs(plain[0] - plain_again[0]) > 1e-4
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(plain[1]))


def test_adapters_are_not_lost_silently_where_remat_was_set_first():
    with pytest.raises(AssertionError, match="before remat"):
        abstract_inject(remat="layer")


def test_a_bf16_base_with_fp32_adapters_stays_bf16_between_layers():
    model = abstract_inject(dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), nnx.state(model, nnx.LoRAParam))
    nnx.update(model, wide)
    graph, state = nnx.split(model)
    hidden = jax.eval_shape(lambda state: nnx.merge(graph, state).hidden(*INPUTS), state)
    logits = jax.eval_shape(lambda state: nnx.merge(graph, state)(*INPUTS), state)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


def test_logits_stay_below_the_softcap():
    model = make_model()
    hidden = 1e3 * jnp.ones((1, 1, VARIANT.hidden))
    assert np.abs(model.logits(hidden)).max() <= VARIANT.softcap
    small = 1e-3 * jnp.ones((1, 1, VARIANT.hidden))
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
    experts = make_model(WITH_EXPERTS).layers[0].experts
    random = np.random.default_rng(0)
    x, shares = random.standard_normal((9, 16)).astype(np.float32), random.random((9, 2)).astype(np.float32)
    chosen = np.array([random.permutation(3)[:2] for _ in range(9)])  # the last expert gets no token
    gate, up = np.split(np.einsum("ne,xef->nxf", x, experts.gate_up_proj[...]), 2, axis=-1)
    everyone = np.einsum("nxf,xfe->nxe", jax.nn.gelu(gate, approximate=True) * up, experts.down_proj[...])
    expected = (np.take_along_axis(everyone, chosen[..., None], axis=1) * shares[..., None]).sum(axis=1)
    np.testing.assert_allclose(experts(x, shares, chosen), expected, atol=1e-5)
