import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from gemsmith.arch import find_variant
from gemsmith.checkpoints.folder import INDEX, open_checkpoint
from gemsmith.errors import CheckpointError
from tiny_checkpoints import make_checkpoint, with_vision


@pytest.mark.parametrize("name", ["tiny-12b", "tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
def test_a_checkpoint_of_more_than_ten_layers_that_transformers_saved_again_is_the_same(name, tmp_path):
    variant = with_vision(replace(find_variant(name), layers=12))
    base = open_checkpoint(str(make_checkpoint(variant, tmp_path / "base")))
    (architecture,) = base.config["architectures"]
    model = getattr(transformers, architecture).from_pretrained(base.folder, dtype=torch.bfloat16)
    again = tmp_path / "again"
    model.save_pretrained(again, max_shard_size="500KB")
    transformers.AutoTokenizer.from_pretrained(base.folder).save_pretrained(again)
    saved = open_checkpoint(str(again))
    assert saved.config["text_config"]["per_layer_config"].keys() >= {"05", "11"} and (again / INDEX).exists()
    assert saved.variant == base.variant and saved.places.keys() == base.places.keys()
    assert saved.fingerprint() == base.fingerprint()


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint("tiny-12b"), tmp_path / "copy"))


def test_a_missing_shard_is_named(folder, refused):
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refused(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_a_truncated_shard_is_named(folder, keep, refused):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    assert shard.name in refused(folder)


def test_a_damaged_header_is_named(folder, refused):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:8] + b"\xff" * 40 + shard.read_bytes()[48:])
    assert "header is damaged" in refused(folder)


@pytest.mark.parametrize(
    ("key", "value"), [("intermediate_size", 256), ("num_hidden_layers", 6), ("vocab_size", 999), ("head_dim", 64)]
)
def test_a_config_that_contradicts_the_tensors_is_refused(folder, key, value, refused):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][key] = value
    if key == "num_hidden_layers":
        config["text_config"]["layer_types"] = ["sliding_attention", "full_attention"] * 3
    (folder / "config.json").write_text(json.dumps(config))
    assert "config.json describes" in refused(folder)


def test_another_variant_than_the_recipe_names_is_refused(folder):
    with pytest.raises(CheckpointError, match="is not tiny-31b: layers 6 != 4"):
        open_checkpoint(str(folder), variant=find_variant("tiny-31b"))


def test_names_of_the_text_only_class_are_refused_with_the_class_to_save_as(folder, refused):
    for shard in folder.glob("*.safetensors"):
        save_file({name.replace("language_model.", ""): weight for name, weight in load_file(shard).items()}, shard)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name.replace("language_model.", ""): shard for name, shard in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    message = refused(folder)
    assert (
        "model.embed_tokens.weight is another class's name for it: save the model with its ForConditionalGeneration "
        "class" in message
    )


def test_missing_files_are_named(folder, refused):
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(folder)
    (folder / "config.json").unlink()
    assert "config.json" in refused(folder)


def test_a_towers_tensor_of_the_same_ending_is_not_taken_for_a_missing_one(folder, refused):
    shard = next(
        file
        for file in folder.glob("*.safetensors")
        if "model.language_model.layers.0.input_layernorm.weight" in load_file(file)
    )
    names = {
        "model.language_model.layers.0.input_layernorm.weight": (
            "model.vision_tower.encoder.layers.0.input_layernorm.weight"
        )
    }
    save_file({names.get(name, name): weight for name, weight in load_file(shard).items()}, shard)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {names.get(name, name): place for name, place in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    assert refused(folder).endswith("such as model.language_model.layers.0.input_layernorm.weight")


def test_a_base_with_an_adapter_beside_it_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"holds adapter_config\.json, so that transformers would put that adapter on the weights"
    ):
        open_checkpoint(str(folder))


def test_an_index_that_leaves_the_folder_is_refused(folder, refused):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.language_model.norm.weight"] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert "lies outside the folder" in refused(folder)


def test_weights_that_others_would_take_from_another_file_are_refused(folder, refused):
    index = json.loads((folder / INDEX).read_text())
    last = "model-00003-of-00003.safetensors"
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / last)
    name = next(name for name, shard in index["weight_map"].items() if shard == "model-00001-of-00002.safetensors")
    index["weight_map"][name] = last
    (folder / INDEX).write_text(json.dumps(index))
    assert f"is in model-00001-of-00002.safetensors and {last}; copy the folder again" in refused(folder)
    shutil.copy(folder / last, folder / "model.safetensors")
    assert "has model.safetensors, which transformers reads, and beside it model.safetensors" in refused(folder)


@pytest.mark.parametrize("shard", [None, 1])
def test_an_index_whose_shards_are_no_names_is_refused(folder, shard, refused):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.language_model.norm.weight": shard}}))
    assert "is damaged; copy it again" in refused(folder)


@pytest.mark.parametrize("changed", [False, True])
def test_a_head_that_was_saved_beside_the_embedding_must_be_the_same(folder, refused, changed):
    """transformers leaves such a head as it is, so what is trained would not be what is served."""
    shard = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    head = tensors["model.language_model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": head + np.float32(0.1) * changed}, shard)
    if changed:
        assert "lm_head.weight is not model.language_model.embed_tokens.weight, to which every" in refused(folder)
    else:
        assert "lm_head.weight" in open_checkpoint(str(folder)).places
