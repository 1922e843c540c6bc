"""XLA's flags: which are Gemsmith's, which the recipe's, and what is said of one that XLA does not take."""

import re

import jax
import pytest

from gemsmith.arch import find_variant
from gemsmith.errors import MachineError, RecipeError
from gemsmith.recipe.schema import Train
from gemsmith.train.jax.compile import COMPILER_OPTIONS, compiler_options, explain_refusal
from gemsmith.train.jax.mesh import make_execution, make_mesh
from gemsmith.train.stage import train


def test_null_takes_one_of_gemsmiths_flags_away_and_tuned_off_takes_all():
    (flag,) = COMPILER_OPTIONS["cpu"]
    own = {"xla_cpu_enable_fast_math": False}
    assert compiler_options("cpu", Train(compiler_options={flag: None})) == {}
    assert compiler_options("cpu", Train(compiler_options={flag: None, **own}, optimizations="off")) == own
    assert compiler_options("tpu", Train(optimizations="off")) == {} == compiler_options("gpu", Train())
    assert compiler_options("tpu", Train(compiler_options=own)) == COMPILER_OPTIONS["tpu"] | own


@pytest.mark.parametrize(("platform", "there"), [("cpu", "xla_cpu_experimental_ynn_fusion_type"), ("gpu", "none")])
def test_a_null_that_takes_no_flag_away_is_refused_before_the_model_is_read(small_recipe, platform, there):
    line = (
        rf"^train\.compiler_options\.xla_tpu_a: null takes away a flag that Gemsmith sets, which it does not set on "
        rf"{platform}; name one of those that it sets there \({there}\), or leave it out$"
    )
    with pytest.raises(RecipeError, match=line):
        compiler_options(platform, Train(compiler_options={"xla_tpu_a": None}))
    with pytest.raises(RecipeError, match=r"^train\.compiler_options\.xla_tpu_a: null takes away"):
        recipe, variant = small_recipe(train={"compiler_options": {"xla_tpu_a": None}}), find_variant("tiny-12b")
        make_execution(recipe, variant, make_mesh(recipe, variant))


def test_a_flag_that_is_refused_without_being_named_is_found_by_trying_each():
    """As a compiler of another vendor may say it; and no flag is blamed for memory."""
    flags, recipe = {"xla_cpu_enable_fast_math": False, "xla_no_such": 1}, Train()
    unnamed = jax.errors.JaxRuntimeError("INTERNAL: bad options")
    assert "XLA on cpu does not take xla_no_such=1 (" in str(explain_refusal(unnamed, flags, recipe))
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: raise xla_no_such")
    assert explain_refusal(full, flags, recipe) is None
    assert explain_refusal(unnamed, {"xla_cpu_enable_fast_math": False}, recipe) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("xla_no_such", True, "xla_no_such=true .*No such compile option"),
        ("xla_cpu_enable_fast_math", "maybe", 'xla_cpu_enable_fast_math="maybe" .*is not a valid bool value'),
    ],
)
def test_a_flag_of_the_recipes_that_xla_does_not_take_is_one_line(prepared_run, name, value, says):
    with pytest.raises(
        RecipeError, match=rf"^train\.compiler_options\.{name}: the recipe sets it, but XLA on cpu"
    ) as error:
        train(prepared_run(train={"compiler_options": {name: value}}))
    assert re.search(rf"{says}.*\); mend it, or leave it out$", str(error.value)) and "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("xla_no_such", True), ("xla_cpu_experimental_ynn_fusion_type", "NO_SUCH")]
)
def test_a_flag_of_gemsmiths_that_xla_does_not_take_is_one_line_and_can_be_taken_away(
    prepare, tmp_path, monkeypatch, name, value
):
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", {"xla_cpu_enable_fast_math": False, name: value})
    with pytest.raises(
        MachineError, match=rf"^XLA on cpu does not take {name}=.*, which Gemsmith sets itself"
    ) as error:
        train(prepare(tmp_path / "run", train={"max_steps": 1}))
    first, second = re.search(r"with: --set (\S+), or all .* with: --set (\S+)$", str(error.value)).groups()
    assert (first, second) == (f"train.compiler_options.{name}=null", "train.optimizations=off")
    assert train(prepare(tmp_path / "run", train={"compiler_options": {name: None}, "max_steps": 1})).steps
    assert train(prepare(tmp_path / "other", train={"optimizations": "off", "max_steps": 1})).steps
