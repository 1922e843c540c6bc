import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemsmith.arch import VARIANTS
from gemsmith.errors import InputError, RecipeError
from gemsmith.hardware import load_catalog
from gemsmith.plan.stage import plan, plan_only, write_fix
from gemsmith.recipe.load import load_recipe
from gemsmith.runs.plan_records import PlanRecord
from gemsmith.runs.resolve import resolve
from gemsmith.runs.run import is_up_to_date, open_run, read_record

RECIPES = Path(__file__).parents[2] / "recipes"


def test_every_shipped_recipe_is_planned():
    files = sorted(RECIPES.rglob("*.yaml"))
    names = {"demo.yaml", "demo_images.yaml", "pets_31b.yaml", "verilog_31b.yaml"}
    assert names <= {file.name for file in files}
    for file in files:
        loaded = load_recipe(file)
        # The demo's checkpoint says what it is; a plan needs no more of it than that.
        record = plan_only(loaded.model_copy(update={"model": loaded.model or "tiny-31b"}))
        assert len(record.machines) == len(loaded.hardware.machines), file
        assert all(machine.fits and machine.hours for machine in record.machines), file


def test_the_papers_recipe_fits_all_its_machines():
    record = plan_only(resolve(load_recipe(RECIPES / "verilog_31b.yaml"))[0])
    assert [machine.name for machine in record.machines] == ["v5p-8", "v6e-8", "2xh100"]
    assert all(machine.fits for machine in record.machines)
    assert record.model == "gemma4-31b" and record.trained_parameters == 489_717_760
    assert record.tokens_per_step == 8 * 4096


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_planned_on_this_machine_too(name, recipe):
    record = plan_only(recipe(name, machines=("cpu", "8xb200")))
    cpu, b200 = record.machines
    assert b200.fits and 0 < b200.step_s[0] <= b200.step_s[1]
    assert set(cpu.mesh.values()) == {1} and cpu.step_s[0] > b200.step_s[0]
    assert not cpu.fits or cpu.usd == (0, 0)


def test_hours_and_dollars_follow_from_steps_and_price(recipe):
    record = plan_only(recipe(max_steps=360))
    machine = record.machines[0]
    assert (record.steps, record.priced_steps) == (360, 360)
    starts = [sum(ends) for ends in zip(*machine.startup_s.values(), strict=True)]
    expected = [second / 10 + start / 3600 for second, start in zip(machine.step_s, starts, strict=True)]
    assert machine.hours == pytest.approx(expected, rel=1e-3) and min(starts) > 60
    assert machine.usd == pytest.approx([16.80 * hours for hours in machine.hours], rel=1e-3)
    assert any("16.80 USD/h on demand, gcp us-central1" in note and "spot from 3.34" in note for note in machine.notes)


def test_unknown_steps_are_priced_by_the_thousand_and_said_so(recipe):
    record = plan_only(recipe())
    assert record.steps is None and record.priced_steps == 1000
    machine = record.machines[0]
    assert machine.hours[0] > machine.step_s[0] / 3.6 and machine.hours[1] < 1.1 * machine.step_s[1] / 3.6
    assert "for 1,000 steps" in record.assumptions[0]


def test_a_machine_that_is_too_small_has_no_hours_and_says_why(recipe):
    machine = plan_only(recipe(machines=("1xh100",))).machines[0]
    assert (machine.fits, machine.hours, machine.usd) == (False, None, None)
    assert "GiB a chip of 74.5" in machine.notes[0]
    assert machine.hbm_bytes_per_chip > machine.hbm_limit_bytes_per_chip


def test_a_machine_without_a_price_has_hours_and_no_dollars(recipe):
    machine = plan_only(recipe("gemma4-e2b", machines=("v5e-4",))).machines[0]
    assert machine.fits and machine.hours and machine.usd is None
    assert any("no on-demand price" in note for note in machine.notes)


def test_a_mesh_that_training_would_not_choose_by_itself_is_spelled_out(recipe):
    notes = {machine.name: " ".join(machine.notes) for machine in plan_only(recipe(remat="layer")).machines}
    assert "set train.mesh to {fsdp: 4, tp: 2}" in notes["v6e-8"] and "set train.mesh" not in notes["v5p-8"]


def test_what_training_keeps_by_itself_is_said_for_each_machine(recipe):
    notes = {machine.name: " ".join(machine.notes) for machine in plan_only(recipe()).machines}
    assert "train.remat auto: lora, down, o, attended, v, k, q saved" in notes["v5p-8"]
    assert "train.remat auto: lora, down, o, attended saved" in notes["v6e-8"]


def test_nothing_is_called_measured(recipe):
    record = plan_only(recipe(dtype="float32"))
    assert any("estimated by formula; nothing was measured" in assumption for assumption in record.assumptions)
    assert any("float32" in assumption for assumption in record.assumptions)


def test_an_unknown_machine_is_refused_by_key(recipe):
    with pytest.raises(RecipeError, match=r"hardware\.machines: 'v5p-9'.*did you mean v5p-8"):
        plan_only(recipe(machines=("v5p-9",)))


def test_a_users_prices_are_used_and_their_file_is_in_the_record(tmp_path, recipe):
    own = tmp_path / "own.yaml"
    own.write_text(
        "machines: {v5p-8: {prices: [{provider: gcp, region: r, usd_per_hour: 10, source: contract, date: "
        "'2026-11-01'}]}}"
    )
    record = plan_only(recipe(max_steps=360, catalog=str(own)))
    assert record.machines[0].usd == pytest.approx([10 * hours for hours in record.machines[0].hours], rel=1e-3)
    assert len(record.provenance.inputs_sha256["catalog"]) == 64


def test_the_stage_writes_its_record_and_is_complete(tmp_path, recipe):
    run = open_run(tmp_path / "run", recipe())
    record = plan(run)
    assert read_record(run, PlanRecord) == record and is_up_to_date(run, "plan")


def test_planning_imports_no_numerics():
    code = (
        "import sys; from gemsmith.recipe.load import build_recipe; from gemsmith.plan.stage import plan_only;"
        "plan_only(build_recipe({'checkpoint': 'x', 'model': 'gemma4-31b', 'data': {'train': 'x'}}));"
        "print(sorted({'numpy', 'jax', 'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_is_every_machine_of_the_catalog_ranked_by_dollars(recipe):
    machines = plan_only(recipe(), "all", "usd").machines
    assert {machine.name for machine in machines} == set(load_catalog().machines) and len(machines) >= 24
    groups = [
        (not machine.fits, (machine if machine.fits else machine.fix or machine).usd is None) for machine in machines
    ]
    assert groups == sorted(groups), "what fits first, and there what has a price"
    dollars = [machine.usd[1] for machine in machines if machine.usd]
    assert dollars == sorted(dollars) and len(dollars) > 8


def test_by_hours_the_fastest_comes_first(recipe):
    hours = [machine.hours[1] for machine in plan_only(recipe(), "v6e-8, 2xh100,v5p-32", "hours").machines]
    assert hours == sorted(hours) and len(hours) == 3


def test_on_takes_near_names_once_each_and_leaves_the_recipes_own(recipe):
    assert [machine.name for machine in plan_only(recipe(), "h200,1xh200, V5P-8").machines] == ["1xh200", "v5p-8"]


@pytest.mark.parametrize(
    ("machine", "message"), [(" , ", "--machine ' , ': names no machine"), ("v5p-9", "--machine: 'v5p-9' is not")]
)
def test_names_that_mean_nothing_are_refused_by_option(recipe, machine, message):
    with pytest.raises(InputError) as error:
        plan_only(recipe(), machine)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("machine", "name"), [("h100", "1xh100"), ("v5e-4", "v5e-4")])
def test_the_fix_is_a_recipe_that_fits(tmp_path, recipe, machine, name):
    wanted, file = recipe(remat="none"), tmp_path / "fixed.yaml"
    write_fix(wanted, plan_only(wanted, machine), file)
    (machine,) = plan_only(load_recipe(file)).machines
    assert (machine.name, machine.fits) == (name, True)
    assert f"# gemsmith plan --fix: to fit {name}" in file.read_text()


def test_a_fix_is_refused_where_there_is_nothing_to_write(tmp_path, recipe):
    file, there = tmp_path / "new" / "fixed.yaml", tmp_path / "there.yaml"
    there.write_text("mine")
    for machine, path, message in (
        ("v5p-8", file, "fits v5p-8 as it is"),
        ("v5p-8,h100", file, "2 machines are planned; name one with --machine"),
        ("l4", file, "no change was found"),
        ("h100", there, "already exists"),
    ):
        with pytest.raises(InputError, match=message):
            write_fix(recipe(), plan_only(recipe(), machine), path)
    assert there.read_text() == "mine" and not file.parent.exists()


def test_the_whole_catalog_takes_little_time(recipe):
    """About 0.1 CPU-seconds; the command's imports take 0.3 more."""
    before = time.process_time()
    plan_only(recipe(), "all", "usd")
    assert time.process_time() - before < 5
