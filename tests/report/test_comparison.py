import json

import pytest

from gemsmith.analysis.compare import compare_sides
from gemsmith.analysis.confounders import KINDS
from gemsmith.analysis.summary import read_side, read_sides
from gemsmith.errors import InputError, RunError, VersionError
from gemsmith.runs.plan_records import PlanPrice
from gemsmith.runs.run import read_record, write_record
from gemsmith.runs.stages import STAGES


def change(run, stage, **values):
    record = read_record(run, STAGES[stage].record)
    write_record(run, record.model_copy(update=values))


def price(run):
    machines = read_record(run, STAGES["plan"].record).machines
    paid = PlanPrice(usd_per_hour=16.8, basis="gcp us-central1, a list", date="2026")
    change(run, "plan", machines=tuple(machine.model_copy(update={"price": paid}) for machine in machines))


def test_runs_are_named_by_their_folders_or_paths_where_two_are_alike(make_run):
    paths = [make_run(name).path for name in ("a/run", "b/run", "c/other")]
    assert [side.name for side in read_sides(paths)] == [str(paths[0]), str(paths[1]), "other"]
    with pytest.raises(InputError, match="is given twice"):
        read_sides([paths[0], paths[0]])


def test_what_is_missing_is_one_line(make_run):
    run = make_run(without=("bench", "eval"))
    side = read_side(run.path, "run")
    assert side.missing[0] == f"no record of bench, eval; gemsmith run {run.path} makes them."
    assert side.cells == () and side.real_tokens_per_s


def test_a_truncated_record_is_one_line_and_the_rest_stays(make_run):
    run = make_run()
    file = run.record_file("bench")
    file.write_bytes(file.read_bytes()[:200])
    side = read_side(run.path, "run")
    lines = [line for line in side.missing if "bench.json" in line]
    assert len(lines) == 1 and "is not a record of this version" in lines[0] and "\n" not in lines[0]
    assert side.cells == () and side.scores


def test_a_record_of_another_version_is_refused_by_its_version(make_run):
    run = make_run()
    content = json.loads(run.record_file("train").read_text())
    run.record_file("train").write_text(json.dumps(content | {"schema_version": 7, "from_the_future": 1}))
    with pytest.raises(VersionError, match=r"train\.json: has schema_version 7, this Gemsmith .* reads 1"):
        read_sides([run.path])


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="holds no recipe"):
        read_sides([tmp_path])


def test_a_plan_without_prices_says_how_to_get_them(make_run):
    run = make_run()
    assert any("run: gemsmith plan" in line for line in read_side(run.path, "run").missing)
    price(run)
    assert not any("run: gemsmith plan" in line for line in read_side(run.path, "run").missing)


def test_machines_that_the_records_do_not_tell_are_given(make_run):
    run = make_run()
    price(run)
    machine = read_record(run, STAGES["train"].record).provenance.machine
    provenance = read_record(run, STAGES["train"].record).provenance
    chips = machine.model_copy(update={"accelerators": ("TPU v5",) * 4})
    change(run, "train", provenance=provenance.model_copy(update={"machine": chips}))
    assert read_sides([run.path])[0].train_rates == {}
    (side,) = read_sides([run.path], trained_on=["v5p-8"], served_on=["run=v6e-8"])
    assert side.train_rates["on demand"].machine == "v5p-8" and side.serve_rates["on demand"].machine == "v6e-8"
    assert side.conditions["price:training_on_demand"] == "gcp us-central1, a list"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["v9"], r"--trained-on v9: the plan of run does not have it; it has v5p-8, v6e-8, 2xh100"),
        (["walk=v5p-8"], r"--trained-on walk=v5p-8: walk is not one of the runs; these are run"),
        (["v5p-8"], r"--trained-on v5p-8: the train record of run has no accelerator, so it was trained on cpu"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(make_run, given, message):
    with pytest.raises(InputError, match=message):
        read_sides([make_run().path], trained_on=given)


def test_a_price_of_chips_that_did_not_train_is_refused_and_a_missing_one_said(make_run):
    run = make_run()
    price(run)
    provenance = read_record(run, STAGES["train"].record).provenance
    chips = provenance.machine.model_copy(update={"accelerators": ("NVIDIA H100 80GB HBM3",) * 8})
    change(run, "train", provenance=provenance.model_copy(update={"machine": chips}), machine="8xh100")
    with pytest.raises(InputError, match=r"has 8 x NVIDIA H100 80GB HBM3, so it was trained on 8xh100"):
        read_sides([run.path], trained_on=["2xh100"])
    (side,) = read_sides([run.path])
    assert side.train_rates == {} and any(
        "no price of an hour of 8xh100, which trained" in line for line in side.missing
    )


def edit_recipe(run, key, value):
    """As with an editor, after the run."""
    recipe = json.loads(json.dumps(run.recipe.model_dump(mode="json")))
    section, name = key.split(".")
    recipe[section][name] = value
    run.recipe_file.write_text(json.dumps(recipe))


def bears(compared):
    return {each.condition: set(each.confounds) for each in compared.differences if each.confounds}


@pytest.mark.parametrize(
    ("key", "value", "stale", "spared"),
    [
        ("lora.rank", 32, "train:stale", set()),
        ("optimizer.learning_rate", 0.5, "train:stale", set()),
        ("bench.output_tokens", 77, "bench:stale", {"training speed", "quality"}),
        ("eval.max_tokens", 77, "eval:stale", {"training speed", "serving speed", "cost"}),
        ("hardware.machines", ["v5p-8"], None, {"training speed", "serving speed", "quality", "cost"}),
    ],
)
def test_a_recipe_that_was_edited_afterwards_is_not_taken_for_what_the_records_were_made_from(
    make_run, key, value, stale, spared
):
    """Runs of ranks 64 and 16 whose recipes were made alike afterwards had a headline."""
    runs = [make_run("a"), make_run("b")]
    before = read_sides([run.path for run in runs])
    assert key in before[0].conditions and not before[0].unproven
    unlike = bears(compare_sides(before, varying=["model"]))
    edit_recipe(runs[1], key, value)
    sides = read_sides([run.path for run in runs])
    found = bears(compare_sides(sides, varying=["model"]))
    added = {name: kinds for name, kinds in found.items() if name not in unlike}
    assert set(added) == ({stale} if stale else set()), "the keys that may be others are no rows of their own"
    assert (key not in sides[1].conditions) == (stale is not None)
    assert set().union(*added.values()) == (set(KINDS) - spared if stale else set())


def test_two_runs_that_are_stale_alike_are_not_alike(make_run):
    runs = [make_run("a"), make_run("b")]
    for run in runs:
        edit_recipe(run, "lora.rank", 32)
    compared = compare_sides(read_sides([run.path for run in runs]))
    (row,) = (each for each in compared.differences if each.condition == "train:stale")
    assert row.values == ("yes", "yes") and set(row.confounds) == set(KINDS)
    assert not any(ratio.is_headline for ratio in compared.pairs[0].ratios)


def test_a_record_that_does_not_say_what_it_was_made_from_is_stale(make_run):
    """It was a traceback."""
    run = make_run("a")
    provenance = read_record(run, STAGES["train"].record).provenance
    change(run, "train", provenance=provenance.model_copy(update={"inputs_sha256": {}}))
    side = read_side(run.path, "a")
    assert "lora.rank" in side.unproven and side.conditions["train:stale"] == "yes"


def test_a_record_replaced_since_confounds_what_was_made_from_it(make_run):
    runs = [make_run("a"), make_run("b")]
    change(runs[1], "data", rows=7)
    found = bears(compare_sides(read_sides([run.path for run in runs]), varying=["model"]))
    assert "train:stale" in found and "lora.rank" in read_side(runs[1].path, "b").conditions
