import copy
import dataclasses
import json

import pytest
import transformers

from gemsmith.arch import VARIANTS, find_variant, read_variant
from gemsmith.arch.config import differing_fields
from gemsmith.errors import CheckpointError
from support.cases import each
from tiny_checkpoints import make_config, text_config, with_vision


def config_of(variant):
    return {"model_type": variant.model_type, "text_config": text_config(variant)}


@pytest.fixture
def config():
    return config_of(find_variant("gemma4-31b"))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_reads_back_from_its_own_config(name):
    variant = VARIANTS[name]
    assert differing_fields(read_variant(config_of(variant)), variant) == []
    assert differing_fields(read_variant(text_config(variant)), variant) == []


def test_a_config_that_gives_the_global_heads_by_layer_is_read(config):
    """As transformers writes it from 5.19 on."""
    text = config["text_config"]
    del text["global_head_dim"], text["num_global_key_value_heads"]
    of_global = {"head_dim": 512, "num_key_value_heads": 4}
    text["per_layer_config"] = {
        str(layer): dict(of_global) for layer, kind in enumerate(text["layer_types"]) if kind == "full_attention"
    }
    assert differing_fields(read_variant(config), find_variant("gemma4-31b")) == []
    for layer, entry in (
        ("0", {"head_dim": 128}),
        ("5", {"head_dim": 128}),
        ("5", {"sliding_window": 8}),
        ("5", 512),
        ("full_attention", {}),
        ("60", {"head_dim": 512}),
        ("-5", {"head_dim": 512}),
        ("05", {"head_dim": 512}),  # beside "5"
        ("", {}),
    ):
        bad = copy.deepcopy(config)
        bad["text_config"]["per_layer_config"][layer] = entry
        with pytest.raises(CheckpointError, match="per_layer_config must"):
            read_variant(bad)


@pytest.mark.parametrize("name", ["Gemma4Config", "Gemma4TextConfig", "Gemma4UnifiedConfig"])
@pytest.mark.parametrize(("layers", "every"), [(6, 3), (11, 11), (12, 6), (60, 6), (105, 7)])
def test_configs_that_transformers_saved_are_read(name, layers, every, tmp_path):
    """Its keys are zero-padded from eleven layers on; both forms are read, and so is no key at all."""
    published = dataclasses.replace(
        find_variant("tiny-12b" if "Unified" in name else "tiny-31b"), layers=layers, global_every=every
    )
    published = published if "Text" in name else with_vision(published)
    config = text_config(published) if "Text" in name else make_config(published)
    getattr(transformers, name).from_dict(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    text = saved.get("text_config", saved)
    padded = text["per_layer_config"]
    assert "global_head_dim" not in text and f"{every - 1}".zfill(len(str(layers - 1))) in padded
    for keys in (padded, {key.lstrip("0"): entry for key, entry in padded.items()}):
        text["per_layer_config"] = keys
        found = read_variant(saved)
        assert differing_fields(found, published) == [] and found.vision == published.vision
    text["per_layer_config"] = {}  # where global heads are as the others
    assert read_variant(saved).global_head_dim == published.head_dim


@each(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"num_hidden_layers": 59}, "60 layer_types for 59"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 30}, "layer_types are not a repeated pattern"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ({"num_key_value_heads": 7}, "7 kv heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({"hidden_size": "5376"}, "hidden_size = '5376'"),
        ({"layer_types": [], "num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"num_kv_shared_layers": 60}, "none before them is sliding_attention"),
        ({"num_kv_shared_layers": 55}, "none before them is full_attention"),
        (
            {"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 8, "top_k_experts": 5},
            "top_k_experts = 5",
        ),
        ({"enable_moe_block": True}, "num_experts = None"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input = 9"),
        ({"layer_types": 60}, "layer_types = 60; it must be a list of names"),
        ({"layer_types": [["full_attention"]] * 60}, "layer_types = [["),
        ({"rope_parameters": ["default"]}, "rope_parameters = ['default']; it must be an object"),
        ({"rope_parameters": {"sliding_attention": 1, "full_attention": {}}}, "rope_parameters.sliding_attention = 1"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": "big"}, "full_attention": {}}},
            "rope_parameters.sliding_attention.rope_theta = 'big'; it must be a number from 1e-12",
        ),
        ({"final_logit_softcapping": "soft"}, "final_logit_softcapping = 'soft'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"rms_norm_eps": {}}, "rms_norm_eps = {}"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps = 1e-300; it must be a number from 1e-12 to 1e+12"),
        ({"final_logit_softcapping": True}, "final_logit_softcapping = True"),
        ({"sliding_window": 2**31}, "sliding_window = 2147483648; it must be a whole number above 0 and below 2^31"),
        ({"num_key_value_heads": True}, "num_key_value_heads = True"),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1},
                    "full_attention": {"rope_theta": 1, "partial_rotary_factor": 5},
                }
            },
            "rope_parameters.full_attention.partial_rotary_factor = 5; it must be a number from 1e-12 to 1",
        ),
        ({"hidden_size": "word " * 999}, "hidden_size = 'word word"),
    ],
)
def test_a_config_that_is_no_gemma_4_is_refused_by_the_key(config, change, message):
    bad = copy.deepcopy(config)
    for key, value in change.items():
        if value is None:
            del bad["text_config"][key]
        else:
            bad["text_config"][key] = value
    with pytest.raises(CheckpointError) as error:
        read_variant(bad)
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("full_attention", {"factor": 8.0}, "rope_parameters.full_attention.factor = 8.0"),
        ("full_attention", {"rope_type": "yarn"}, "rope_parameters.full_attention.rope_type = 'yarn'"),
        (
            "sliding_attention",
            {"rope_type": "linear", "factor": 4.0},
            "rope_parameters.sliding_attention.rope_type = 'linear'",
        ),
    ],
)
def test_another_rotation_than_gemma_4s_is_refused(config, kind, change, message):
    config["text_config"]["rope_parameters"][kind] |= change
    with pytest.raises(CheckpointError, match=message):
        read_variant(config)


def test_an_untied_head_of_the_whole_model_is_refused(config):
    with pytest.raises(CheckpointError, match="tie_word_embeddings = False"):
        read_variant({**config, "tie_word_embeddings": False})


def test_a_whole_config_of_another_model_is_refused(config):
    with pytest.raises(CheckpointError, match="model_type 'gemma3'; allowed: gemma4, gemma4_unified"):
        read_variant({**config, "model_type": "gemma3"})


def test_differing_fields_names_what_differs():
    variant = find_variant("tiny-31b")
    assert differing_fields(variant, dataclasses.replace(variant, ffn=1, name="other")) == [f"ffn {variant.ffn} != 1"]
