import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gemsmith.checkpoint import open_checkpoint
from gemsmith.checkpoint.folder import INDEX
from gemsmith.errors import CheckpointError
from gemsmith.testing.tiny import make_checkpoint
from gemsmith.zoo import VARIANTS, find_variant, text_tensors

TINY = [name for name in VARIANTS if name.startswith("tiny")]


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint("tiny-12b"), tmp_path / "copy"))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", TINY)
def test_a_made_checkpoint_opens_as_its_variant_with_every_tensor(name, tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint(name)), variant=find_variant(name))
    assert checkpoint.variant.name == name
    assert set(checkpoint.places) == {tensor.name for tensor in text_tensors(checkpoint.variant)}
    assert checkpoint.read("model.language_model.norm.weight").shape == (checkpoint.variant.embed_dim,)


def test_tensors_read_as_transformers_reads_them(tiny_checkpoint):
    from safetensors import safe_open

    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-31b", "bfloat16")))
    for name, place in checkpoint.places.items():
        with safe_open(place.file, "pt") as file:
            expected = file.get_tensor(name).float().numpy()
        np.testing.assert_array_equal(place.read().astype(np.float32), expected)
        np.testing.assert_array_equal(place.copy().astype(np.float32), expected)


def test_a_copy_of_a_tensor_whose_file_was_shortened_is_refused(tmp_path):
    place = next(
        iter(open_checkpoint(str(make_checkpoint(find_variant("tiny-12b"), tmp_path / "tiny"))).places.values())
    )
    with place.file.open("rb+") as file:
        file.truncate(place.end - 1)
    with pytest.raises(CheckpointError, match="ended early; it was changed while it was read"):
        place.copy()


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    one, two = (make_checkpoint(find_variant("tiny-12b"), tmp_path / name) for name in ("one", "two"))
    for file in sorted(one.iterdir()):
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name


def test_a_missing_shard_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refused(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_a_truncated_shard_is_named(folder, keep):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    assert shard.name in refused(folder)


def test_a_damaged_header_is_named(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:8] + b"\xff" * 40 + shard.read_bytes()[48:])
    assert "header is damaged" in refused(folder)


@pytest.mark.parametrize(
    ("key", "value"), [("intermediate_size", 256), ("num_hidden_layers", 6), ("vocab_size", 999), ("head_dim", 64)]
)
def test_a_config_that_contradicts_the_tensors_is_refused(folder, key, value):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][key] = value
    if key == "num_hidden_layers":
        config["text_config"]["layer_types"] = ["sliding_attention", "full_attention"] * 3
    (folder / "config.json").write_text(json.dumps(config))
    assert "config.json describes" in refused(folder)


def test_another_variant_than_the_recipe_names_is_refused(folder):
    with pytest.raises(CheckpointError, match="is not tiny-31b: layers 6 != 4"):
        open_checkpoint(str(folder), variant=find_variant("tiny-31b"))


def test_names_of_the_text_only_class_are_refused_with_the_class_to_save_as(folder):
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


def test_missing_files_are_named(folder):
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(folder)
    (folder / "config.json").unlink()
    assert "config.json" in refused(folder)


def test_a_towers_tensor_of_the_same_ending_is_not_taken_for_a_missing_one(folder):
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


def test_a_source_that_is_nothing_is_refused(tmp_path):
    assert "is not a folder" in refused(tmp_path / "not" / "there")


def test_an_index_that_leaves_the_folder_is_refused(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.language_model.norm.weight"] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert "lies outside the folder" in refused(folder)


@pytest.mark.parametrize("shard", [None, 1])
def test_an_index_whose_shards_are_no_names_is_refused(folder, shard):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.language_model.norm.weight": shard}}))
    assert "is damaged; copy it again" in refused(folder)


def test_a_bucket_is_copied_once_and_opened(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("GEMSMITH_CACHE", str(tmp_path / "cache"))
    source = tiny_checkpoint("tiny-12b")
    first = open_checkpoint(f"file://{source}")
    stamps = {file: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    again = open_checkpoint(f"file://{source}")
    assert first.folder != source
    assert {file: file.stat().st_mtime_ns for file in again.folder.iterdir()} == stamps
    for name, place in first.places.items():
        np.testing.assert_array_equal(place.read(), open_checkpoint(str(source)).read(name))


def test_a_hub_id_is_taken_from_the_hub_cache(tiny_checkpoint, tmp_path, monkeypatch):
    """The cache's layout is the hub client's own; nothing is asked of the network."""
    snapshot = tmp_path / "models--google--gemma-4-tiny" / "snapshots" / "abc"
    shutil.copytree(tiny_checkpoint("tiny-12b"), snapshot)
    refs = tmp_path / "models--google--gemma-4-tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert open_checkpoint("google/gemma-4-tiny").folder == snapshot


def test_a_hub_id_that_cannot_be_reached_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "could not be downloaded" in refused("google/gemma-4-nothing")
