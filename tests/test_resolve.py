import shutil

import pytest

from gemsmith.errors import RecipeError
from gemsmith.recipe import build_recipe
from gemsmith.resolve import recipe_variant, resolve
from gemsmith.zoo import find_variant


def recipe(checkpoint: object, *overrides: str):
    return build_recipe({"checkpoint": str(checkpoint), "data": {"train": "rows.jsonl", "max_length": 128}}, overrides)


def test_the_model_is_read_from_the_checkpoint(tiny_checkpoint):
    resolved, derived = resolve(recipe(tiny_checkpoint("tiny-e2b")))
    assert resolved.model == "tiny-e2b"
    assert {item.key: item.reason for item in derived}["model"] == "read from the checkpoint's config.json"


def test_the_model_of_a_known_hub_id_needs_no_network():
    assert resolve(recipe("google/gemma-4-31B-it"))[0].model == "gemma4-31b"


def test_the_model_of_an_unknown_hub_id_or_bucket_must_be_given():
    for source in ("someone/their-gemma", "gs://bucket/folder"):
        with pytest.raises(RecipeError, match="model: is missing"):
            resolve(recipe(source))
        assert resolve(recipe(source, "model=gemma4-12b"))[0].model == "gemma4-12b"


def test_a_model_that_is_not_the_checkpoints_is_refused(tiny_checkpoint):
    with pytest.raises(RecipeError, match=r"tiny-12b was given, but checkpoint .* is tiny-e2b"):
        resolve(recipe(tiny_checkpoint("tiny-e2b"), "model=tiny-12b"))


def test_a_model_of_other_numbers_is_called_custom_and_read_from_its_config(tiny_checkpoint, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(tiny_checkpoint("tiny-12b"), folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"intermediate_size": 128', '"intermediate_size": 96'))
    resolved, _ = resolve(recipe(folder))
    assert resolved.model == "custom"
    assert recipe_variant(resolved).ffn == 96
    assert resolve(resolved)[0] == resolved


def test_a_resolved_recipe_resolves_to_itself(tiny_checkpoint):
    resolved, _ = resolve(recipe(tiny_checkpoint("tiny-31b")))
    again, derived = resolve(resolved)
    assert (again, derived) == (resolved, [])


def test_paths_become_absolute_where_they_exist(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    assert resolve(recipe(tiny_checkpoint("tiny-31b")))[0].data.train == str(tmp_path / "rows.jsonl")


def test_the_server_takes_what_eval_and_bench_send(tiny_checkpoint):
    folder = tiny_checkpoint("tiny-31b")
    small = ("bench.input_tokens=[32]", "bench.output_tokens=8", "eval.max_tokens=50")
    assert resolve(recipe(folder, *small))[0].serve.max_model_len == 128
    assert resolve(recipe(folder, *small, "data.eval=held.jsonl"))[0].serve.max_model_len == 178
    assert resolve(recipe(folder))[0].serve.max_model_len == find_variant("tiny-31b").context


def test_a_step_may_be_told_in_tokens(tiny_checkpoint):
    folder = tiny_checkpoint("tiny-31b")
    resolved, _ = resolve(recipe(folder, "train.tokens_per_step=512"))
    assert resolved.train.rows_per_step == 4
    assert resolve(resolved)[0] == resolved
    for overrides in (["train.tokens_per_step=500"], ["train.tokens_per_step=512", "train.rows_per_step=3"], ["train.tokens_per_step=64"]):
        with pytest.raises(RecipeError, match=r"train\.tokens_per_step"):
            resolve(recipe(folder, *overrides))


@pytest.mark.parametrize("key", ["data.max_length", "serve.max_model_len"])
def test_lengths_beyond_the_model_are_refused(tiny_checkpoint, key):
    with pytest.raises(RecipeError, match=rf"{key}: 4096 was given; tiny-31b reads at most 2048"):
        resolve(recipe(tiny_checkpoint("tiny-31b"), f"{key}=4096"))


def test_a_folder_for_checkpoints_is_made_absolute_before_it_is_there(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"checkpoint": str(tiny_checkpoint("tiny-31b")), "data": {"train": {"task": "verilog", "rows": 3}}}
    for folder, expected in (("saved", str(tmp_path / "saved")), ("gs://bucket/saved", "gs://bucket/saved"), ("/saved", "/saved")):
        recipe = resolve(build_recipe(values, [f"train.checkpoint_folder={folder}", "data.max_length=64"]))[0]
        assert recipe.train.checkpoint_folder == expected
        assert resolve(recipe)[0] == recipe
