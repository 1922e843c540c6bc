import json

import pytest

from gemsmith.errors import InputError
from gemsmith.report.runs import find_runs, print_runs, read_listed
from gemsmith.runs.run import read_record, write_record
from gemsmith.runs.stages import STAGES
from gemsmith.system.locks import locked


def test_each_state_is_told_apart(make_run, tmp_path):
    make_run("whole")
    make_run("begun", without=("serve", "bench", "eval"))
    make_run("bad", verified=False)
    broken = make_run("broken").record_file("train")
    broken.write_text(broken.read_text()[:99])
    stale = make_run("changed")
    record = read_record(stale, STAGES["train"].record)
    provenance = record.provenance.model_copy(update={"inputs_sha256": {"recipe": "0"}})
    write_record(stale, record.model_copy(update={"provenance": provenance}))
    assert {run.name: run.state for run in find_runs(tmp_path)} == {
        "whole": "complete",
        "begun": "stopped",
        "bad": "failed",
        "broken": "damaged",
        "changed": "stale",
    }


def test_a_whole_run_is_complete_and_a_locked_one_is_running(make_run):
    run = make_run()
    assert read_listed(run.path).state == "complete"
    with locked(run.path):
        assert read_listed(run.path).state == "running"
    assert read_listed(run.path).state == "complete"


def test_the_line_holds_what_the_records_say(make_run):
    run = make_run()
    listed = read_listed(run.path)
    train, scores = (read_record(run, STAGES[stage].record) for stage in ("train", "eval"))
    assert (listed.loss, listed.speed) == (train.steps[-1].loss, train.real_tokens_per_s)
    assert (listed.score, listed.stage) == (scores.tuned.score, "eval")
    assert listed.started == "2026-05-01T09:00:00+00:00" and listed.cost is None


def test_runs_are_sorted_with_those_that_lack_it_last(make_run, tmp_path):
    make_run("short", steps=40)
    make_run("long", steps=300)
    make_run("none", without=("train",))
    losses = {name: read_listed(tmp_path / name).loss for name in ("short", "long")}
    low, high = sorted(losses, key=losses.get)
    assert losses[low] < losses[high]
    assert [run.name for run in find_runs(tmp_path, sort="loss")] == [low, high, "none"]
    assert [run.name for run in find_runs(tmp_path, sort="loss", reverse=True)] == [high, low, "none"]


def test_runs_are_filtered_by_name_and_state(make_run, tmp_path):
    make_run("gpu-1")
    make_run("gpu-2", without=("eval",))
    make_run("tpu-1")
    assert [run.name for run in find_runs(tmp_path, name="gpu-*", sort="name")] == ["gpu-1", "gpu-2"]
    assert [run.name for run in find_runs(tmp_path, states=["stopped"])] == ["gpu-2"]
    with pytest.raises(InputError, match=r"--state stoped: is none \(did you mean stopped\?\)"):
        find_runs(tmp_path, states=["stoped"])
    with pytest.raises(InputError, match="nowhere: is not a folder"):
        find_runs(tmp_path / "nowhere")


def test_one_run_directory_is_listed_alone(make_run):
    run = make_run()
    assert [each.name for each in find_runs(run.path)] == ["run"]


def test_a_recipe_that_cannot_be_read_is_one_line_of_its_run(make_run, tmp_path, capsys):
    run = make_run()
    run.recipe_file.write_text("checkpoint: [")
    listed = find_runs(tmp_path)
    assert listed[0].state == "damaged" and "recipe.yaml" in listed[0].problem
    print_runs(listed, tmp_path)
    assert "run: recipe " in capsys.readouterr().out


def test_json_has_no_nan(make_run):
    run = make_run()
    record = read_record(run, STAGES["train"].record)
    last = record.steps[-1].model_copy(update={"loss": float("nan")})
    write_record(run, record.model_copy(update={"steps": (*record.steps[:-1], last)}))
    values = json.loads(json.dumps(read_listed(run.path).as_json(), allow_nan=False))
    assert values["loss"] == "nan" and values["path"] == str(run.path)


def test_an_empty_folder_says_so(tmp_path, capsys):
    print_runs(find_runs(tmp_path), tmp_path)
    assert "no such run directory" in capsys.readouterr().out
