import json
import os

import pytest

from gemsmith.errors import RecipeError
from gemsmith.recipe.load import build_recipe, dump_recipe, load_recipe, read_reasons
from gemsmith.recipe.schema import GeneratedData, Recipe, ResolvedValue
from support.cases import each

MINIMAL = {"checkpoint": "/folder", "data": {"train": "/rows.jsonl"}}


def refused(values: object, *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        build_recipe(values, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def with_value(key: str, value: object) -> dict:
    values = json.loads(json.dumps(MINIMAL))
    *parents, last = key.split(".")
    place = values
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return values


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("data.pakcing", "data.pakcing (did you mean packing?)"),
        ("lorra", "unknown key lorra (did you mean lora?)"),
        ("train.mesh.fdsp", "train.mesh.fdsp (did you mean fsdp?)"),
        ("train.learning_rate", "unknown key train.learning_rate (did you mean optimizer.learning_rate?)"),
        ("optimizer.lr", "unknown key optimizer.lr (did you mean optimizer.learning_rate?)"),
        ("nothing_like_it", "unknown key nothing_like_it; allowed there: model, checkpoint"),
    ],
)
def test_an_unknown_key_is_refused_with_a_near_match(key, expected):
    assert expected in refused(with_value(key, 1))


@each(
    ("key", "value", "expected"),
    [
        ("lora.rank", "big", "lora.rank: 'big' was given"),
        ("lora.rank", 0, "lora.rank: 0 was given"),
        ("lora.rank", 1.5, "lora.rank: 1.5 was given"),
        ("data.packing", "yes please", "data.packing: 'yes please' was given"),
        ("lora.dropout", 1.0, "lora.dropout: 1.0 was given"),
        ("train.backend", "torch", "train.backend: 'torch' was given"),
        ("data.train", 3, "data.train: 3 was given"),
        ("data.train", "", "data.train: '' was given"),
        ("checkpoint", "", "checkpoint: '' was given"),
        ("seed", -1, "seed: -1 was given, input should be greater than or equal to 0"),
        ("seed", 2**32, "seed: 4294967296 was given, input should be less than 4294967296"),
        ("data.train", {"task": "verilog", "rows": "many"}, "data.train.rows: 'many' was given"),
        ("lora", 5, "lora: 5 was given, it must be a mapping of keys to values"),
        ("hardware.machines", "v5p-8", "hardware.machines: 'v5p-8' was given, it must be a list"),
        (
            "optimizer.learning_rate",
            float("inf"),
            "optimizer.learning_rate: inf was given, input should be a finite number",
        ),
        ("lora.targets", ["q", "vv"], "lora.targets: 'vv' matches nothing (did you mean v?)"),
        ("lora.targets", ["q_proj"], "lora.targets: 'q_proj' matches nothing (did you mean q?)"),
        ("train.compiler_options", 5, "train.compiler_options: 5 was given, it must be a mapping of keys to values"),
        (
            "train.compiler_options",
            {"a": [1]},
            "compiler_options.a: [1] was given, it must be true or false, a number, a text or null",
        ),
        ("seed", -1, "seed: -1 was given"),
        ("seed", 2**63, "seed: 9223372036854775808 was given"),
        ("lora.rank", 10**21, "lora.rank: 1000000000000000000000 was given, input should be less than 2147483648"),
        ("optimizer.warmup_steps", 10**21, "input should be less than or equal to 10000000"),
        ("train.max_steps", 10**22, "train.max_steps: 10000000000000000000000 was given, input should be less than or"),
        (
            "optimizer.learning_rate",
            1e9,
            "learning_rate: 1000000000.0 was given, input should be less than or equal to 1",
        ),
        ("optimizer.epsilon", 1e-60, "optimizer.epsilon: 1e-60 was given, input should be greater than or equal to"),
        ("train.spike_factor", 1e30, "train.spike_factor: 1e+30 was given, input should be less than or equal to"),
        ("train.save_steps", 2**30, "train.save_steps: 1073741824 was given, input should be less than or equal to"),
        ("train.mesh", {"tp": 10**6}, "train.mesh.tp: 1000000 was given, input should be less than or equal to 16384"),
        ("data.limit", 2**30, "data.limit: 1073741824 was given, input should be less than or equal to 100000000"),
        ("bench.request_rates", [1e9], "bench.request_rates.0: 1000000000.0 was given, input should be less than or"),
        ("bench.slo_ttft_ms", 1e12, "bench.slo_ttft_ms: 1000000000000.0 was given, input should be less than or equal"),
        ("eval.tasks", [{"task": "regex", "samples": 10**9}], "eval.tasks.0.samples: 1000000000 was given, input"),
        ("bench.input_tokens", [], "bench.input_tokens: [] was given, it must name at least one"),
        ("bench.request_rates", [], "bench.request_rates: [] was given, it must name at least one"),
        ("hardware.machines", [], "hardware.machines: [] was given, it must name at least one"),
        (
            "data.columns",
            {"promt": "task"},
            "data.columns.promt: 'promt' was given, input should be 'messages', 'prompt'",
        ),
        ("data.train", "a\0b", "was given, it must hold no NUL"),
        ("serve.arguments", ["a", "b\0"], "was given, it must hold no NUL"),
        ("model", "gemma4-31", "model: 'gemma4-31' is not known (did you mean gemma4-31b?)"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(key, value, expected):
    values = with_value(key, value)
    if key == "lora.targets":
        values["model"] = "tiny-31b"
    assert expected in refused(values)


def test_all_wrong_keys_are_told_at_once_and_each_once():
    values = with_value("data.pakcing", True) | {"train": {"mesh": {"fdsp": 2}, "remat": ["x"]}, "seed": "no"}
    values["eval"] = {"tasks": [{"task": "exact"}, {"task": "eksact"}, {"tusk": 1}]}
    with pytest.raises(RecipeError) as error:
        build_recipe(values, source="recipe mine.yaml")
    told = [line.split(":")[1].split(" (")[0].strip() for line in str(error.value).splitlines()]
    assert sorted(told) == [
        "eval.tasks.1.task",
        "eval.tasks.2.task is missing; it must be given",
        "seed",
        "train.remat.0",
        "unknown key data.pakcing",
        "unknown key eval.tasks.2.tusk",
        "unknown key train.mesh.fdsp",
    ]
    assert [str(problem) for problem in error.value.problems] == str(error.value).splitlines()


def test_all_contradictions_are_told_at_once():
    more = ["train.method=full", "train.keep=best", "optimizer.warmup_ratio=0.1", "optimizer.warmup_steps=3"]
    with pytest.raises(RecipeError) as error:
        build_recipe(MINIMAL, [*more, "bench.images=true", "lora.rank=8", "lora.alpha=1", "model=gemma4-32b"])
    told = [line.partition(":")[0] for line in str(error.value).splitlines()]
    wanted = ["bench.images", "optimizer.warmup_steps", "train.keep", "lora.rank, lora.alpha", "model"]
    assert told == wanted
    assert build_recipe(MINIMAL | {"lora": {"rank": 8}}, ["train.method=full", "lora={}"]).train.method == "full"


def test_a_missing_key_is_named():
    assert "checkpoint is missing" in refused({"data": {"train": "x"}})


def test_a_model_that_contradicts_the_hub_id_is_refused():
    assert "is gemma4-31b" in refused(MINIMAL | {"checkpoint": "google/gemma-4-31B-it", "model": "gemma4-12b"})


@each("character", "\x1b\x7f\x80\x85\u2028\ufeff\ufffe\U000e0001\n\\")
def test_whatever_characters_a_recipe_holds_come_back_from_its_file(tmp_path, character):
    options = {f"a{character}": f"{character}b"}
    recipe = build_recipe(with_value("data.train", f"/a{character}b") | {"eval": {"options": options}})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_a_pipe_a_device_and_a_huge_file_are_no_recipes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)
    for file, said in (
        (tmp_path / "pipe", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (tmp_path / "huge", "more than"),
    ):
        with pytest.raises(RecipeError, match=f"^recipe .*: cannot be read .*{said}"):
            load_recipe(file)


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2", "", "just text"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match="recipe"):
        load_recipe(file)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_bytes(b"checkpoint: \xff\xfe")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(file)


@pytest.mark.parametrize("override", ["lora.rank", "=3", "lora.rank=[1", "lora.rank=x"])
def test_a_bad_override_is_refused(override):
    refused(MINIMAL, override)


def test_overrides_reach_nested_keys_and_replace_made_rows():
    values = with_value("data.train", {"task": "verilog", "rows": 5})
    recipe = build_recipe(values, ["data.train=rows.jsonl", "lora.targets=[q, v]", "train.mesh.tp=2"])
    assert (recipe.data.train, recipe.lora.targets, recipe.train.mesh.tp) == ("rows.jsonl", ("q", "v"), 2)


def test_a_dumped_recipe_loads_to_itself_with_its_reasons(tmp_path):
    values = with_value("data.train", {"task": "verilog", "rows": 5}) | {"model": "tiny-31b"}
    recipe = build_recipe(values, ["checkpoint='/a: b # c'", "train.mesh.fsdp=2"])
    derived = [
        ResolvedValue("model", "tiny-31b", "read from config.json"),
        ResolvedValue("train.mesh.fsdp", 2, "two: because # so"),
    ]
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe, derived[:1]))
    assert load_recipe(file) == recipe
    assert read_reasons(file.read_text()) == derived[:1]
    hostile = "read from a\nlora: 3\x85lora: 3\u2028lora: 3"
    recipe = build_recipe(values, ['serve.container_image="a\\x85b\\u2028c"'])
    file.write_text(dump_recipe(recipe, [ResolvedValue("model", "tiny-31b", hostile)]))
    assert load_recipe(file) == recipe and recipe.serve.container_image == "a\x85b\u2028c"


@pytest.mark.parametrize("text", ["off", "'off'", "OFF"])
def test_tuned_off_is_taken_from_yaml_and_from_set_and_dumped_so_that_it_loads_again(tmp_path, text):
    """YAML 1.1 reads a bare off as false."""
    file, again = tmp_path / "recipe.yaml", tmp_path / "again.yaml"
    file.write_text(f"checkpoint: x\ndata: {{train: y}}\ntrain:\n  optimizations: {text}\n")
    recipe = load_recipe(file)
    assert (
        recipe.train.optimizations == "off"
        and build_recipe(MINIMAL, [f"train.optimizations={text}"]).train.optimizations == "off"
    )
    again.write_text(dump_recipe(recipe))
    assert 'optimizations: "off"' in again.read_text() and load_recipe(again) == recipe


@pytest.mark.parametrize("text", ["on", "none", "null", "0"])
def test_tuned_is_auto_or_off_and_nothing_else(text):
    assert "input should be 'auto' or 'off'" in refused(MINIMAL, f"train.optimizations={text}")


def test_a_recipe_that_trains_all_weights_is_dumped_without_keys_of_adapters(tmp_path):
    recipe = build_recipe(MINIMAL, ["train.method=full"])
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert "lora:" in dump_recipe(build_recipe(MINIMAL)) and "lora:" not in dump_recipe(recipe)
    assert load_recipe(tmp_path / "dumped.yaml") == recipe


def test_a_compiler_flag_may_be_null_and_is_dumped_so_that_it_loads_again(tmp_path):
    recipe = build_recipe(MINIMAL, ["train.compiler_options={a: null, b: 3}", "train.compiler_options.c=true"])
    assert recipe.train.compiler_options == {"a": None, "b": 3, "c": True}
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_an_overridden_recipe_is_a_new_one_that_knows_what_was_given(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("checkpoint: x\ndata: {train: rows.jsonl}\n")
    loaded = Recipe.load(file)
    changed = loaded.override(
        {"lora.rank": 8, "data.train": {"task": "verilog", "rows": 4}, "hardware.machines": ("cpu",)}
    )
    assert (changed.lora.rank, changed.data.train.rows, changed.hardware.machines) == (8, 4, ("cpu",))
    assert changed.override({"data.train.rows": 5}).data.train == GeneratedData(task="verilog", rows=5)
    assert loaded == Recipe.load(file) and loaded.data.train == str(tmp_path / "rows.jsonl")
    assert changed.lora.model_fields_set == {"rank"} and "serve" not in changed.model_fields_set
    for wrong, said in (
        ({"lora.rnak": 2}, r"unknown key lora\.rnak \(did you mean rank"),
        ({"lora.rank": "8"}, r"lora\.rank: '8' was given"),
    ):
        with pytest.raises(RecipeError, match=said) as error:
            loaded.override(wrong)
        assert "\n" not in str(error.value)
