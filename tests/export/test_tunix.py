"""Checkpoints that Tunix and Qwix themselves made: Tunix's Gemma 4, Qwix's adapters with the published recipe's rule,
Tunix's manager."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gemsmith.arch import Variant, find_variant
from gemsmith.errors import CheckpointError
from gemsmith.export.stage import export_tunix
from gemsmith.export.tunix import read_tunix_adapter
from gemsmith.verify.logits import load_model
from tiny_checkpoints import make_checkpoint

# Tunix's own, of names that newer JAX and Flax have elsewhere.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

RANK, ALPHA = 4, 6.0
# Of arXiv 2605.25645, and the same with the global layers' K.
PAPERS_RULE = ".*q_einsum|.*kv_einsum|.*gate_proj|.*down_proj|.*up_proj|.*attn_vec_einsum"
FULL_RULE = PAPERS_RULE + "|.*k_einsum"


class Trained(NamedTuple):
    """A Tunix model with a random adapter, and where its checkpoint is."""

    model: Any
    root: Path


# Few layers, since Qwix traces each.
SHORT_31B = replace(find_variant("tiny-31b"), layers=3)
SHORT_E2B = replace(find_variant("tiny-e2b"), layers=4)


def tunix_config(variant: Variant) -> Any:
    from tunix.models.gemma4 import model as tunix

    kinds = tuple(
        tunix.AttentionType.GLOBAL if variant.is_global(layer) else tunix.AttentionType.LOCAL_SLIDING
        for layer in range(variant.global_every)
    )
    return tunix.ModelConfig(
        num_layers=variant.layers,
        num_embed=variant.vocabulary,
        embed_dim=variant.embed_dim,
        hidden_dim=variant.ffn,
        num_heads=variant.heads,
        head_dim=variant.head_dim,
        num_kv_heads=variant.kv_heads,
        num_global_kv_heads=variant.global_kv_heads if variant.attention_k_eq_v else None,
        global_key_size=variant.global_head_dim,
        sliding_window_size=variant.sliding_window,
        k_eq_v_global=variant.attention_k_eq_v,
        attention_pattern=kinds,
        per_layer_input_dim=variant.per_layer_input,
        frac_shared_layers=variant.kv_shared_layers / variant.layers,
        override_kv_shared_ffw_hidden=2 * variant.ffn if variant.wide_shared_mlp else None,
    )


def make_model(variant: Variant, rule: str) -> Any:
    """Tunix's model with Qwix's adapters, only the adapters with values: random ones, since Qwix starts B at zero.

    Abstractly, because each operation of a model that really runs is compiled by itself, which takes 10 s.
    """
    import jax
    import jax.numpy as jnp
    import qwix
    from flax import nnx
    from tunix.models.gemma4 import model as tunix

    def make() -> Any:
        model = tunix.Gemma4(tunix_config(variant), rngs=nnx.Rngs(0))
        provider = qwix.LoraProvider(module_path=rule, rank=RANK, alpha=ALPHA)
        return qwix.apply_lora_to_model(
            model, provider, jnp.ones((1, 8), jnp.int32), attention_mask=jnp.ones((1, 8, 8), bool)
        )

    model, random = nnx.eval_shape(make), np.random.default_rng(1)
    state = nnx.state(model, nnx.LoRAParam)
    nnx.update(
        model, jax.tree.map(lambda leaf: jnp.asarray(0.1 * random.standard_normal(leaf.shape, np.float32)), state)
    )
    return model


def save(
    model: Any, root: Path, *, step: int = 7, only_lora: bool = True, metadata: dict[str, Any] | None = None
) -> Path:
    from tunix.sft.checkpoint_manager import CheckpointManager

    manager = CheckpointManager(str(root))
    manager.save(step, model, save_only_lora_params=only_lora, force=True, custom_metadata=metadata)
    manager.close()
    return root


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(SHORT_31B, tmp_path_factory.mktemp("base") / "base", dtype="float32")


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    from flax import nnx
    from tunix.models.gemma4 import params_safetensors

    loaded = params_safetensors.create_model_from_safe_tensors(str(base), tunix_config(SHORT_31B))
    model = make_model(SHORT_31B, FULL_RULE)
    nnx.update(model, nnx.state(loaded, nnx.Param))
    return Trained(model=model, root=save(model, tmp_path_factory.mktemp("tunix")))


def test_merged_weights_give_the_logits_of_tunix(trained, base, tmp_path):
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx

    record = export_tunix(str(base), trained.root, tmp_path / "out", alpha=ALPHA)
    assert (record.step, record.merged_tensors) == (7, 20)
    tokens = np.random.default_rng(0).integers(108, 1000, (1, 48))
    mask = jnp.tril(jnp.ones((1, 48, 48), bool))
    graph, state = nnx.split(trained.model)
    expected = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens, attention_mask=mask)[0])(
        state, jnp.asarray(tokens)
    )
    with torch.inference_mode():
        merged = load_model(tmp_path / "out" / "merged")(torch.from_numpy(tokens)).logits.numpy()
        plain = load_model(base)(torch.from_numpy(tokens)).logits.numpy()
    # Measured: see the assertion's numbers; the adapter itself moves logits by more than 1.
    np.testing.assert_allclose(merged, expected, atol=1e-4)
    assert np.abs(merged - plain).max() > 0.1


def test_the_papers_rule_leaves_k_of_global_layers_alone_and_that_is_said(tmp_path):
    root = save(make_model(SHORT_31B, PAPERS_RULE), tmp_path / "root")
    adapter, _, notes = read_tunix_adapter(root, SHORT_31B, alpha=ALPHA)
    assert not any("layers.2.self_attn.k_proj" in module for module in adapter.modules)
    assert len(adapter.modules) == 19
    assert notes == [
        "K of 1 global layers was not adapted: Tunix calls it k_einsum there, which the run's rule did not match"
    ]


def test_layers_that_share_kv_need_none(tmp_path):
    model = make_model(SHORT_E2B, PAPERS_RULE)
    adapter, *_ = read_tunix_adapter(save(model, tmp_path / "root"), SHORT_E2B, alpha=ALPHA)
    assert not any(
        f"layers.{layer}.self_attn.{kind}_proj" in module
        for layer in (2, 3)
        for kind in "kv"
        for module in adapter.modules
    )


@pytest.mark.parametrize("place", ["", "7", "7/model_params"])
def test_the_root_a_step_and_its_parameters_are_read_alike(trained, place):
    adapter, step, _ = read_tunix_adapter(trained.root / place, SHORT_31B, alpha=ALPHA)
    assert (step, adapter.rank, adapter.alpha) == (7, RANK, ALPHA)


def test_a_checkpoint_of_the_whole_model_gives_the_same_adapter(trained, tmp_path):
    variant = SHORT_31B
    whole = read_tunix_adapter(save(trained.model, tmp_path / "whole", only_lora=False), variant, alpha=ALPHA)[0]
    expected = read_tunix_adapter(trained.root, variant, alpha=ALPHA)[0]
    assert whole.modules.keys() == expected.modules.keys()
    for name, pair in expected.modules.items():
        np.testing.assert_array_equal(whole.modules[name].a, pair.a)
        np.testing.assert_array_equal(whole.modules[name].b, pair.b)


@pytest.mark.parametrize("metadata", [{"alpha": 9}, {"lora_config": {"rank": 4, "alpha": 9.0}}])
def test_alpha_is_read_where_the_run_saved_it(trained, tmp_path, metadata):
    root = save(trained.model, tmp_path / "root", metadata=metadata)
    assert read_tunix_adapter(root, SHORT_31B)[0].alpha == 9.0
    assert read_tunix_adapter(root, SHORT_31B, alpha=3.0)[0].alpha == 3.0


@pytest.mark.parametrize(
    ("given", "variant", "message"),
    [
        ({}, SHORT_31B, "does not say alpha; give --alpha"),
        ({"alpha": 0.0}, SHORT_31B, "--alpha 0: must be a number above 0"),
        ({"alpha": 1.0, "rank": 8}, SHORT_31B, "--rank 8: the matrices in .* have rank 4"),
        ({"alpha": 1.0, "step": 9}, SHORT_31B, "--step 9: .* holds the steps 7"),
        ({"alpha": 1.0}, find_variant("tiny-12b"), "is no weight of tiny-12b .4 layers"),
        ({"alpha": 1.0}, find_variant("gemma4-31b"), "is no weight of gemma4-31b"),
    ],
)
def test_what_contradicts_the_checkpoint_is_refused(trained, given, variant, message):
    with pytest.raises(CheckpointError, match=message) as raised:
        read_tunix_adapter(trained.root, variant, **given)
    assert "\n" not in str(raised.value)


def test_layers_without_what_others_have_are_listed(trained):
    longer = replace(SHORT_31B, layers=4)
    with pytest.raises(
        CheckpointError,
        match=r"6 weights of .* have no adapter although other layers' have \(layers\.3\.attn\.attn_vec",
    ):
        read_tunix_adapter(trained.root, longer, alpha=1.0)


def test_adapters_of_weights_that_cannot_be_expressed_are_refused(tmp_path):
    model = make_model(SHORT_E2B, ".*per_layer_model_projection")
    with pytest.raises(CheckpointError, match=r"per_layer_model_projection\.w_lora_\w has no counterpart"):
        read_tunix_adapter(save(model, tmp_path / "root"), SHORT_E2B, alpha=1.0)


def test_an_untrained_adapter_is_refused(tmp_path):
    import jax
    from flax import nnx

    model = make_model(SHORT_31B, ".*q_einsum")
    nnx.update(model, jax.tree.map(lambda leaf: 0 * leaf, nnx.state(model, nnx.LoRAParam)))
    with pytest.raises(CheckpointError, match="is all zero in 3 of 3 modules"):
        read_tunix_adapter(save(model, tmp_path / "root"), SHORT_31B, alpha=1.0)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no complete Tunix checkpoint"):
        read_tunix_adapter(tmp_path, SHORT_31B, alpha=1.0)


def write_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda step: (step / "_CHECKPOINT_METADATA").write_text("[1]"),
            "7: is damaged .* name another step with --step",
        ),
        (
            lambda step: (step / "model_params" / "_METADATA").write_text("[]"),
            "Orbax cannot read it, .*; export another step",
        ),
        (
            lambda step: write_json(step / "model_params" / "_METADATA", tree_metadata=[1]),
            "Orbax cannot read it, .*; export another step",
        ),
        *(
            (
                lambda step, custom=custom: write_json(step / "_CHECKPOINT_METADATA", custom_metadata=custom),
                "does not say alpha; give",
            )
            for custom in ([1], "x", {"alpha": True}, {"lora_config": [1]})
        ),
    ],
)
def test_damaged_metadata_is_refused_in_one_line(trained, tmp_path, damage, message):
    root = shutil.copytree(trained.root, tmp_path / "root")
    damage(root / "7")
    with pytest.raises(CheckpointError, match=message) as raised:
        read_tunix_adapter(root, SHORT_31B)
    assert "\n" not in str(raised.value)


def test_a_leaf_that_is_no_matrix_is_refused(tmp_path, monkeypatch):
    leaves = {("layers", "0", "attn", "q_einsum", f"w_lora_{side}"): np.ones(()) for side in "ab"}
    monkeypatch.setattr("gemsmith.export.tunix.restore_lora", lambda _: iter(leaves.items()))
    (tmp_path / "_METADATA").touch()
    with pytest.raises(CheckpointError, match=r"lora_a or lora_b of layers\.0\.attn\.q_einsum\.w is no matrix"):
        read_tunix_adapter(tmp_path, SHORT_31B, alpha=1.0)
