"""All combinations of what is given and what is left open, for tiny-31b, which reads 2048 tokens."""

import re

import pytest

from gemsmith.arch import find_variant
from gemsmith.errors import RecipeError
from gemsmith.recipe.load import build_recipe, with_values
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.resolve import check_answer, check_cells, check_lengths, check_served, derive_lengths
from support.cases import each

TINY = find_variant("tiny-31b")
EVAL = "data.eval={task: verilog, rows: 3, split: held-out}"


def fitted(*overrides: str) -> tuple[Recipe, list[str]]:
    """The recipe with its lengths, and the keys that were derived."""
    recipe = build_recipe({"checkpoint": "x", "data": {"train": "x"}}, overrides)
    derived = derive_lengths(recipe, TINY)
    return with_values(recipe, derived), [item.key for item in derived]


def check_all(recipe: Recipe) -> None:
    check_lengths(recipe, TINY)
    check_served(recipe, TINY)
    check_cells(recipe, TINY)
    check_answer(recipe, TINY)


@each(
    ("overrides", "inputs", "output", "served"),
    [
        ([], (512, 1792), 256, 2048),
        (["bench.output_tokens=8"], (512, 2040), 8, 2048),
        (["bench.output_tokens=2000"], (48,), 2000, 2048),
        (["bench.input_tokens=[2000]"], (2000,), 48, 2048),
        (["bench.input_tokens=[64, 128]"], (64, 128), 256, 2048),
        (["bench.input_tokens=[1800]", "bench.output_tokens=248"], (1800,), 248, 2048),
        (["serve.max_model_len=1000"], (512, 744), 256, 1000),
        (["serve.max_model_len=640"], (384,), 256, 640),
        (["serve.max_model_len=300"], (150,), 150, 300),
        (["serve.max_model_len=300", "bench.input_tokens=[44]"], (44,), 256, 300),
        (["serve.max_model_len=300", "bench.input_tokens=[60]"], (60,), 240, 300),
        (["data.max_length=64", "bench.input_tokens=[8]", "bench.output_tokens=4"], (8,), 4, 128),
    ],
)
@each("evaluated", [[], [EVAL]])
def test_defaults_become_what_there_is_room_for(overrides, inputs, output, served, evaluated):
    recipe, _ = fitted(*overrides, *evaluated)
    assert (recipe.bench.input_tokens, recipe.bench.output_tokens) == (inputs, output)
    assert recipe.serve.max_model_len == served or (evaluated and recipe.serve.max_model_len == 64 + 512)
    check_all(recipe)
    assert derive_lengths(recipe, TINY) == []


@pytest.mark.parametrize(
    ("overrides", "inputs", "served"),
    [(["data.max_length=640"], (640,), 640 + 512), ([], (1792,), 2048), (["data.max_length=64"], (64,), 64 + 512)],
)
def test_requests_that_are_rows_are_no_longer_than_a_row(overrides, inputs, served):
    recipe, keys = fitted("bench.images=true", "data.eval=rows.jsonl", *overrides)
    assert (recipe.bench.input_tokens, recipe.serve.max_model_len) == (inputs, served)
    assert "bench.input_tokens" in keys and derive_lengths(recipe, TINY) == []
    check_all(recipe)


def test_a_default_that_fits_is_left_alone():
    assert fitted("data.max_length=256", "bench.input_tokens=[8]", EVAL)[1] == ["serve.max_model_len"]
    big = build_recipe({"checkpoint": "x", "data": {"train": "x"}})
    assert [item.key for item in derive_lengths(big, find_variant("gemma4-31b"))] == ["serve.max_model_len"]


@pytest.mark.parametrize(("served", "expected"), [(640, 512), (576, 512), (575, 287), (300, 150), (128, 64)])
def test_answers_of_eval_leave_room_for_prompts(served, expected):
    recipe, _ = fitted(f"serve.max_model_len={served}", EVAL)
    assert recipe.eval.max_tokens == expected
    assert fitted(f"serve.max_model_len={served}")[0].eval.max_tokens == 512  # nothing is asked


def test_a_row_is_no_longer_than_the_model_reads_and_the_reason_says_so():
    derived = derive_lengths(build_recipe({"checkpoint": "x", "data": {"train": "x"}}), TINY)
    assert derived[0] == ("data.max_length", 2048, "the default is 4096, tiny-31b reads at most this")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["data.max_length=4096"],
            "data.max_length: 4096 was given; tiny-31b reads at most 2048 tokens; set 2048 or less",
        ),
        (
            ["serve.max_model_len=4096"],
            "serve.max_model_len: 4096 was given; tiny-31b reads at most 2048 tokens; set 2048 or less",
        ),
        (
            ["serve.max_model_len=127"],
            "serve.max_model_len: 127 was given; the first prompt and answer of serve need 128",
        ),
        (
            ["bench.input_tokens=[9, 2048]"],
            "bench.input_tokens: 2048 leaves no room for an answer in the 2048 that tiny-31b reads; lower it",
        ),
        (
            ["bench.output_tokens=2048"],
            "bench.output_tokens: 2048 leaves no room for a prompt in the 2048 that tiny-31b reads; lower it",
        ),
        (
            ["bench.input_tokens=[1900]", "bench.output_tokens=149"],
            "bench.input_tokens: 1900 and bench.output_tokens: 149 make 2049 tokens, more than the 2048 that tiny-31b "
            "reads; "
            "lower one of them",
        ),
        (
            ["bench.input_tokens=[16, 601]", "bench.output_tokens=40", "serve.max_model_len=640"],
            "bench.input_tokens: 601 and bench.output_tokens: 40 make 641 tokens, more than serve.max_model_len: 640; "
            "lower one of them, "
            "or set serve.max_model_len to 641 or more",
        ),
        (
            ["eval.max_tokens=2048", EVAL],
            "eval.max_tokens: 2048 leaves no room for a prompt in the 2048 that tiny-31b reads; lower it",
        ),
        (
            ["eval.max_tokens=300", "serve.max_model_len=300", EVAL],
            "eval.max_tokens: 300 leaves no room for a prompt in serve.max_model_len: 300; lower it, or set "
            "serve.max_model_len to 364 or",
        ),
    ],
)
def test_what_is_given_and_has_no_room_is_an_error_with_a_remedy(overrides, expected):
    with pytest.raises(RecipeError) as refusal:
        check_all(fitted(*overrides)[0])
    assert str(refusal.value).startswith(expected)


def test_the_remedy_of_a_longer_server_works():
    sweep = ["bench.input_tokens=[16, 601]", "bench.output_tokens=40"]
    check_all(fitted(*sweep, "serve.max_model_len=641")[0])
    check_all(fitted("eval.max_tokens=300", "serve.max_model_len=364", EVAL)[0])


def test_a_named_grid_is_served_and_not_cut():
    big = build_recipe({"checkpoint": "x", "data": {"train": "x"}, "bench": {"grid": "paper"}})
    (served,) = derive_lengths(big, find_variant("gemma4-31b"))
    assert (served.key, served.value) == ("serve.max_model_len", 15_360 + 512)
    recipe, keys = fitted("bench.grid=short")
    assert keys == ["data.max_length", "serve.max_model_len"] and recipe.bench.input_tokens == (512, 4096)
    check_all(recipe)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["bench.grid=paper"],
            "bench.grid: paper sends and asks for 15872 tokens, more than the 2048 that tiny-31b reads",
        ),
        (
            ["bench.grid=short", "serve.max_model_len=256"],
            "bench.grid: short sends and asks for 288 tokens, more than serve.max_model_len: 256; set it to own, or "
            "set serve.max_model_len to 288 or more",
        ),
    ],
)
def test_a_named_grid_without_room_is_one_line(overrides, message):
    recipe, _ = fitted(*overrides)
    with pytest.raises(RecipeError, match=f"^{re.escape(message)}"):
        check_cells(recipe, TINY)


def test_the_task_whose_answers_are_too_long_is_named():
    tasks = "eval.tasks=[{task: verilog, dataset: a}, {task: verilog, dataset: b, max_tokens: 4000}]"
    with pytest.raises(RecipeError, match=r"^eval\.tasks\.1\.max_tokens: 4000 leaves no room for a prompt"):
        check_answer(fitted(tasks)[0], TINY)
