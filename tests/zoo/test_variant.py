import copy
import dataclasses

import pytest

from gemsmith.errors import CheckpointError, RecipeError
from gemsmith.zoo import VARIANTS, find_variant, read_variant, variant_of_hub_id
from gemsmith.zoo.variant import differing_fields


def config_of(variant):
    return {"model_type": variant.model_type, "text_config": variant.to_config()}


@pytest.fixture
def config():
    return config_of(find_variant("gemma4-31b"))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_reads_back_from_its_own_config(name):
    variant = VARIANTS[name]
    assert differing_fields(read_variant(config_of(variant), name=name), variant) == []
    assert differing_fields(read_variant(variant.to_config()), variant) == []


@pytest.mark.parametrize(
    ("name", "layers", "global_layers"),
    [("gemma4-e2b", 35, 7), ("gemma4-e4b", 42, 7), ("gemma4-12b", 48, 8), ("gemma4-26b-a4b", 30, 5), ("gemma4-31b", 60, 10)],
)
def test_global_layers_are_as_many_as_published(name, layers, global_layers):
    kinds = find_variant(name).layer_types
    assert (len(kinds), kinds.count("full_attention"), kinds[-1]) == (layers, global_layers, "full_attention")


def test_a_config_that_gives_the_global_head_dim_by_layer_is_read(config):
    text = config["text_config"]
    del text["global_head_dim"]
    text["per_layer_config"] = {
        str(layer): {"head_dim": 512 if kind == "full_attention" else 256} for layer, kind in enumerate(text["layer_types"])
    }
    assert read_variant(config).global_head_dim == 512
    text["per_layer_config"]["0"]["head_dim"] = 128
    with pytest.raises(CheckpointError, match="per_layer_config names 2 head_dims"):
        read_variant(config)


@pytest.mark.parametrize(
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
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_whole_config_of_another_model_is_refused(config):
    with pytest.raises(CheckpointError, match="model_type 'gemma3'; allowed: gemma4, gemma4_unified"):
        read_variant({**config, "model_type": "gemma3"})


def test_hub_ids_are_known_whatever_their_case():
    assert variant_of_hub_id("google/gemma-4-31b-IT").name == "gemma4-31b"
    assert variant_of_hub_id("google/gemma-3-27b") is None


def test_an_unknown_model_names_a_near_one():
    with pytest.raises(RecipeError, match=r"model: 'gemma4-31' is not known \(did you mean gemma4-31b\?\)"):
        find_variant("gemma4-31")


def test_differing_fields_names_what_differs():
    variant = find_variant("tiny-31b")
    assert differing_fields(variant, dataclasses.replace(variant, ffn=1, name="other")) == [f"ffn {variant.ffn} != 1"]
