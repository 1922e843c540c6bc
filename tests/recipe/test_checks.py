import pytest

from gemsmith.arch import find_variant
from gemsmith.errors import RecipeError
from gemsmith.recipe.checks import check_served_adapter
from gemsmith.recipe.load import build_recipe
from tiny_checkpoints import with_vision

MINIMAL = {"checkpoint": "folder", "data": {"train": "rows.jsonl"}}


@pytest.mark.parametrize(
    ("backend", "key", "expected"),
    [
        (
            "tunix",
            "attention=sdpa",
            "attention: sdpa was given, train.backend tunix has auto, splash, dense; set one of them",
        ),
        ("trl", "attention=splash", "attention: splash was given, train.backend trl has auto, documents, sdpa, eager"),
        ("trl", "remat=[o]", "remat: a list of results was given, train.backend trl has auto, none, layer; set"),
        (
            "trl",
            "offload=[o]",
            r'offload: \["o"\] was given, but train.backend trl keeps all on the device; leave it out, or set ',
        ),
        (
            "trl",
            "compiler_options.a=true",
            'compiler_options: {"a": true} was given, but train.backend trl does not use',
        ),
        (
            "trl",
            "optimizations=off",
            "optimizations: off was given, but train.backend trl has none of .* set train.backend to tunix$",
        ),
        (
            "trl",
            "checkpoint_folder=gs://b/f",
            "checkpoint_folder: gs://b/f was given, but train.backend trl saves to folders only",
        ),
        ("trl", "dtype=int8", "dtype: int8 was given, train.backend trl has bfloat16, float32, nf4; set one"),
    ],
)
def test_what_a_backend_has_not_is_refused_before_any_stage(backend, key, expected):
    with pytest.raises(RecipeError, match=f"^train.{expected}"):
        build_recipe(MINIMAL, [f"train.backend={backend}", f"train.{key}"])
    assert build_recipe(MINIMAL, [f"train.backend={'trl' if backend == 'tunix' else 'tunix'}", f"train.{key}"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], r"train\.double_quant: true was given, and train\.dtype bfloat16; set nf4"),
        (["train.dtype=nf4"], r"export\.merge_into: trained was given, and train\.double_quant rounds .* to original$"),
        (["train.backend=tunix"], r"train\.double_quant: true was given, but train\.backend tunix keeps .* to trl$"),
    ],
)
def test_scales_are_rounded_only_where_that_is_known_to_all_stages(overrides, expected):
    given = ["train.backend=trl", "train.double_quant=true"]
    with pytest.raises(RecipeError, match=f"^{expected}"):
        build_recipe(MINIMAL, [*given, *overrides])
    assert build_recipe(MINIMAL, [*given, "train.dtype=nf4", "export.merge_into=original"]).train.double_quant


def test_all_linear_is_for_the_backend_that_has_peft():
    with pytest.raises(
        RecipeError, match=r"^lora\.targets: all-linear was given, and train\.backend tunix adapts proj"
    ):
        build_recipe(MINIMAL, ["lora.targets=[all-linear]"])
    assert build_recipe(MINIMAL, ["lora.targets=[all-linear]", "train.backend=trl"]).lora.targets == ("all-linear",)


@pytest.mark.parametrize("targets", ["q, vision", "all-linear"])
def test_an_adapter_of_the_tower_that_vllm_would_leave_out_is_refused_before_it_is_trained(targets):
    seeing = with_vision(find_variant("tiny-31b"))
    recipe = build_recipe(MINIMAL, [f"lora.targets=[{targets}]", "train.backend=trl", "serve.weights=adapter"])
    with pytest.raises(RecipeError, match=rf"^serve\.weights: adapter was given, but lora\.targets {targets} adapts "):
        check_served_adapter(recipe, seeing)
    check_served_adapter(build_recipe(MINIMAL, ["lora.targets=[vision]", "serve.weights=merged"]), seeing)
    if targets == "all-linear":
        check_served_adapter(recipe, find_variant("tiny-31b"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], r"^bench\.images: true was given, and data\.eval names no rows with images; "),
        (["data.eval={task: verilog, rows: 3}"], r"^bench\.images: true was given, and data\.eval names no rows"),
        (["data.eval=rows.jsonl", "bench.grid=short"], r"^bench\.images: .* bench\.grid short sends random text"),
        (
            ["data.eval=rows.jsonl", "bench.input_tokens=[64, 128]"],
            r"^bench\.input_tokens: 64, 128 was given, and ",
        ),
        (
            ["data.eval=rows.jsonl", "bench.input_tokens=[8192]"],
            r"^bench\.input_tokens: 8192 was given, and ",
        ),
    ],
)
def test_requests_with_images_are_rows_and_nothing_else(overrides, expected):
    with pytest.raises(RecipeError, match=expected):
        build_recipe(MINIMAL, ["bench.images=true", *overrides])
    assert build_recipe(MINIMAL, ["bench.images=true", "data.eval=rows.jsonl"]).bench.images
