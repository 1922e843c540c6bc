import json
import shutil
from pathlib import Path

import pytest

from gemsmith.arch import find_variant
from gemsmith.errors import CheckpointError, RecipeError
from gemsmith.recipe.keys import value_at
from gemsmith.recipe.load import build_recipe, dump_recipe, load_recipe
from gemsmith.runs.resolve import check_settings, place_recipe, recipe_variant, resolve, resolve_again, resolve_file
from gemsmith.runs.run import find_run, open_run


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


def test_all_weights_get_a_learning_rate_of_their_own_unless_one_is_given(tiny_checkpoint):
    values = {"checkpoint": str(tiny_checkpoint("tiny-31b")), "data": {"train": "x"}, "train": {"method": "full"}}
    recipe, derived = resolve(build_recipe(values))
    assert recipe.optimizer.learning_rate == 1e-5
    assert [item.reason for item in derived if item.key == "optimizer.learning_rate"] == [
        "train.method is full; the default, 1e-4, is for adapters"
    ]
    given, derived = resolve(build_recipe(values | {"optimizer": {"learning_rate": 1e-4}}))
    assert given.optimizer.learning_rate == 1e-4 and "optimizer.learning_rate" not in {item.key for item in derived}


def test_a_step_may_be_told_in_tokens(tiny_checkpoint):
    folder = tiny_checkpoint("tiny-31b")
    resolved, _ = resolve(recipe(folder, "train.tokens_per_step=512"))
    assert resolved.train.global_batch_size == 4
    assert resolve(resolved)[0] == resolved
    for overrides in (
        ["train.tokens_per_step=500"],
        ["train.tokens_per_step=512", "train.global_batch_size=3"],
        ["train.tokens_per_step=64"],
    ):
        with pytest.raises(RecipeError, match=r"train\.tokens_per_step"):
            resolve(recipe(folder, *overrides))


@pytest.mark.parametrize("key", ["data.max_length", "serve.max_model_len"])
def test_lengths_beyond_the_model_are_refused(tiny_checkpoint, key):
    with pytest.raises(RecipeError, match=rf"{key}: 4096 was given; tiny-31b reads at most 2048"):
        resolve(recipe(tiny_checkpoint("tiny-31b"), f"{key}=4096"))


def test_a_folder_for_checkpoints_is_made_absolute_before_it_is_there(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"checkpoint": str(tiny_checkpoint("tiny-31b")), "data": {"train": {"task": "verilog", "rows": 3}}}
    for folder, expected in (
        ("saved", str(tmp_path / "saved")),
        ("gs://bucket/saved", "gs://bucket/saved"),
        ("/saved", "/saved"),
    ):
        recipe = resolve(build_recipe(values, [f"train.checkpoint_folder={folder}", "data.max_length=64"]))[0]
        assert recipe.train.checkpoint_folder == expected
        assert resolve(recipe)[0] == recipe


def reopened(folder, recipe_, derived, *overrides, used=()):
    file = folder / "recipe.yaml"
    file.write_text(dump_recipe(recipe_, derived))
    return resolve_again(load_recipe(file), file, overrides, used=lambda key: key in used)


def open_lengths(checkpoint, *overrides):
    return resolve(
        build_recipe({"checkpoint": str(checkpoint), "data": {"train": {"task": "verilog", "rows": 3}}}, overrides)
    )


@pytest.fixture
def wide_checkpoint(tiny_checkpoint, tmp_path):
    """tiny-31b with a context of 131,072 tokens."""
    folder = tmp_path / "wide"
    shutil.copytree(tiny_checkpoint("tiny-31b"), folder)
    text = (folder / "config.json").read_text()
    assert '"max_position_embeddings": 2048' in text
    (folder / "config.json").write_text(
        text.replace('"max_position_embeddings": 2048', '"max_position_embeddings": 131072')
    )
    return folder


def test_a_recipe_in_a_run_directory_resolves_to_itself(tiny_checkpoint, tmp_path):
    resolved, derived = open_lengths(tiny_checkpoint("tiny-31b"))
    assert resolve(resolved) == (resolved, [])
    assert reopened(tmp_path, resolved, derived)[0] == resolved


def test_what_one_model_had_no_room_for_is_not_held_against_another(tiny_checkpoint, wide_checkpoint, tmp_path):
    small, derived = open_lengths(tiny_checkpoint("tiny-31b"))
    assert (small.data.max_length, small.bench.input_tokens) == (2048, (512, 1792))
    wide, derived = reopened(
        tmp_path, small, derived, f"checkpoint={wide_checkpoint}", used=("data.max_length", "serve.max_model_len")
    )
    assert (wide.model, wide.data.max_length, wide.bench.input_tokens) == ("custom", 4096, (512, 4096))
    assert wide.serve.max_model_len == 4096 + 256
    back, reasons = reopened(tmp_path, wide, derived, f"checkpoint={tiny_checkpoint('tiny-31b')}")
    assert (back.model, back.data.max_length, back.bench.input_tokens) == ("tiny-31b", 2048, (512, 1792))
    assert {"data.max_length", "bench.input_tokens"} <= {item.key for item in reasons}


def test_what_the_user_gave_is_held_against_another_model(tiny_checkpoint, wide_checkpoint, tmp_path):
    wide, derived = open_lengths(wide_checkpoint, "data.max_length=3000")
    with pytest.raises(RecipeError, match=r"data\.max_length: 3000 was given; tiny-31b reads at most 2048"):
        reopened(tmp_path, wide, derived, f"checkpoint={tiny_checkpoint('tiny-31b')}")


def test_a_derived_length_makes_way_for_what_is_set_unless_it_was_used(wide_checkpoint, tmp_path):
    wide, derived = open_lengths(wide_checkpoint)
    more = "bench.input_tokens=[9000]"
    assert reopened(tmp_path, wide, derived, more)[0].serve.max_model_len == 9256
    kept, _ = reopened(tmp_path, wide, derived, more, used=("serve.max_model_len",))
    assert kept.serve.max_model_len == 4352
    with pytest.raises(
        RecipeError, match=r"bench\.input_tokens: 9000 leaves no room .* serve\.max_model_len: 4352; lower it, or set"
    ):
        check_settings(kept)
    again, derived = open_lengths(wide_checkpoint, "data.max_length=64", "train.tokens_per_step=256")
    assert again.train.global_batch_size == 4
    assert reopened(tmp_path, again, derived, "train.tokens_per_step=512")[0].train.global_batch_size == 8


def test_defaults_that_an_earlier_version_left_too_long_are_mended_when_a_run_is_opened(tiny_checkpoint, tmp_path):
    before, _ = open_lengths(tiny_checkpoint("tiny-31b"), "data.max_length=256", "bench.input_tokens=[512, 4096]")
    with pytest.raises(RecipeError, match=r"bench\.input_tokens: 4096 leaves no room"):
        check_settings(before)
    after, reasons = reopened(tmp_path, before, [])
    assert after.bench.input_tokens == (512, 1792)
    assert [item.key for item in reasons] == ["bench.input_tokens"]


def test_only_the_stages_that_are_asked_for_are_checked(tiny_checkpoint):
    impossible, _ = open_lengths(
        tiny_checkpoint("tiny-31b"), "bench.output_tokens=4000", "train.gradient_accumulation_steps=3"
    )
    check_settings(impossible, ["plan", "data", "export", "serve", "eval"])
    for stage, key in (("bench", "bench.output_tokens"), ("train", "train.global_batch_size")):
        with pytest.raises(RecipeError, match=f"^{key}"):
            check_settings(impossible, [stage])


def test_a_recipe_that_a_later_stage_cannot_have_is_refused_when_it_is_read(tiny_checkpoint, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        f"checkpoint: {tiny_checkpoint('tiny-31b')}\ndata: {{train: rows.jsonl}}\nbench: {{output_tokens: 4000}}\n"
    )
    with pytest.raises(RecipeError, match=r"^bench\.output_tokens: 4000 leaves no room for a prompt"):
        resolve_file(file)


def test_open_warmup_has_its_reason_beside_it(tiny_checkpoint):
    folder = tiny_checkpoint("tiny-31b")
    reasons = {item.key: item.reason for item in open_lengths(folder)[1]}
    assert reasons["optimizer.warmup_steps"].startswith("a tenth of all steps, at most 100")
    for given in ("optimizer.warmup_steps=5", "optimizer.warmup_ratio=0.1"):
        assert "optimizer.warmup_steps" not in {item.key for item in open_lengths(folder, given)[1]}


@pytest.mark.parametrize("overrides", [[], ["model=tiny-31b"]])
def test_an_address_that_cannot_be_fetched_is_refused_at_once(overrides):
    with pytest.raises(CheckpointError, match=r"checkpoint s3://b/f: s3:// is not known; allowed: gs://bucket/folder"):
        resolve(recipe("s3://b/f", *overrides))


def test_paths_of_a_recipe_count_from_its_folder_and_those_that_are_set_from_this_one(
    tiny_checkpoint, tmp_path, monkeypatch
):
    inner, file = tmp_path / "inner", tmp_path / "inner" / "my.yaml"
    shutil.copytree(tiny_checkpoint("tiny-31b"), inner / "google" / "base")
    values = {
        "checkpoint": "google/base",
        "data": {"train": "../a.jsonl", "eval": "5%", "max_length": 128},
        "train": {"checkpoint_folder": "saved"},
        "eval": {"tasks": [{"task": "verilog", "dataset": "problems", "prompt": "mine.txt"}]},
        "hardware": {"catalog": "~/c.yaml"},
    }
    file.write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for path in (Path("inner/my.yaml"), file):
        recipe, derived = resolve_file(path)
        assert recipe.checkpoint == str(inner / "google" / "base") and recipe.data.train == str(tmp_path / "a.jsonl")
        assert recipe.train.checkpoint_folder == str(inner / "saved") and recipe.hardware.catalog == "/home/me/c.yaml"
        assert recipe.eval.tasks[0].dataset == str(inner / "problems") and recipe.data.held_out == 0.05
        assert recipe.eval.tasks[0].prompt == str(inner / "mine.txt")
    # The run's copy names the same from anywhere, also what is not there yet.
    run = open_run(tmp_path / "runs" / "my", recipe, derived)
    monkeypatch.chdir("/")
    assert find_run(run.path) == recipe and resolve(find_run(run.path))[0] == recipe
    monkeypatch.chdir(inner)
    set_here = resolve_file(Path("my.yaml"), ["data.train=b.jsonl", "eval.tasks=[{task: mine.py}]"])[0]
    assert (set_here.data.train, set_here.eval.tasks[0].task) == (str(inner / "b.jsonl"), str(inner / "mine.py"))
    monkeypatch.chdir(tmp_path)
    set_here = resolve_file(Path("inner/my.yaml"), ["data.train=b.jsonl"])[0]
    assert set_here.data.train == set_here.data.eval == str(tmp_path / "b.jsonl")


def test_a_hub_id_is_no_path_and_neither_is_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for checkpoint in ("google/gemma-4-E2B-it", "gs://bucket/base"):
        Path("my.yaml").write_text(f"model: gemma4-e2b\ncheckpoint: {checkpoint}\ndata: {{train: a.jsonl}}\n")
        assert resolve_file(Path("my.yaml"))[0].checkpoint == checkpoint


@pytest.mark.parametrize("key", ["checkpoint", "data.train"])
def test_what_only_the_folder_that_this_was_started_in_has_is_refused_with_both_places(key, tmp_path, monkeypatch):
    values = {"checkpoint": "google/gemma-4-E2B-it", "data": {"train": "a.jsonl"}}
    name = value_at(values, key)
    (tmp_path / "inner").mkdir()
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / "inner" / "my.yaml").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=rf"^{key}: {name} .*\({tmp_path}/inner/{name}\).*\({tmp_path}/{name}\)"):
        load_recipe("inner/my.yaml")
    assert value_at(load_recipe("inner/my.yaml", [f"{key}=./{name}"]), key) == f"./{name}"
    monkeypatch.chdir(tmp_path / "inner")
    load_recipe("my.yaml")


def test_a_recipe_for_another_folder_names_what_is_here_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    given = build_recipe({"checkpoint": "owner/name", "data": {"train": "a.jsonl", "eval": "later.jsonl"}})
    given = given.override({"train.checkpoint_folder": "saved"})
    placed = place_recipe(given, Path("inner"))
    assert placed.train.checkpoint_folder == str(tmp_path / "saved")
    assert (placed.data.train, placed.data.eval) == (str(tmp_path / "a.jsonl"), "later.jsonl")
    assert place_recipe(given, Path()) == given
