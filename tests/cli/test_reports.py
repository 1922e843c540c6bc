import csv
import io
import json
from pathlib import Path

import pytest

from gemsmith.recipe.load import dump_recipe
from gemsmith.runs.records import read_record_file
from gemsmith.runs.resolve import resolve_file
from gemsmith.runs.run import Run, inputs_sha256, write_record
from gemsmith.runs.stages import STAGES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo_run(tmp_path):
    """Returns a function that makes a run directory of the demo's kept records under another recipe."""

    def make(name, *overrides):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        given = [f"checkpoint={ROOT}/recipes/demo_base", *overrides]
        recipe, _ = resolve_file(ROOT / "recipes/demo.yaml", given)
        (folder / "recipe.yaml").write_text(dump_recipe(recipe))
        run = Run(path=folder, recipe=recipe)
        for stage, row in STAGES.items():
            record = read_record_file(
                ROOT / f"benchmarks/records/demo/{stage}.json", row.record, missing="", damaged=""
            )
            provenance = record.provenance.model_copy(
                update={"inputs_sha256": record.provenance.inputs_sha256 | inputs_sha256(run, stage)}
            )
            write_record(run, record.model_copy(update={"provenance": provenance}))
        return folder

    return make


def test_two_runs_are_compared_in_every_form(gemsmith, demo_run, tmp_path):
    a, b = demo_run("a"), demo_run("b", "lora.rank=32")
    code, out, _ = gemsmith("report", a, b)
    assert code == 0 and "What is compared is lora.rank" in out and "training speed: b against a" in out
    compared = json.loads(gemsmith("report", a, b, "--json")[1])
    assert compared["varying"] == ["lora.rank"] and compared["pairs"][0]["other"] == "b"
    assert "| `lora.rank` | 16 | 32 | what is compared |" in gemsmith("report", a, b, "--md")[1]
    rows = list(csv.DictReader(io.StringIO(gemsmith("report", a, b, "--csv")[1])))
    assert rows[0]["what"] == "lora.rank" and len(rows) > 10
    code, out, _ = gemsmith("report", a, b, "--html", tmp_path / "page.html")
    assert code == 0 and out == f"{tmp_path}/page.html\n"
    assert "<h2>b against a</h2>" in (tmp_path / "page.html").read_text()
    assert not (a / "report.html").exists() and not (b / "report.html").exists()


def test_what_is_compared_and_for_how_long_can_be_said(gemsmith, demo_run):
    runs = demo_run("a"), demo_run("b", "lora.rank=32", "optimizer.learning_rate=0.001")
    assert json.loads(gemsmith("report", *runs, "--json")[1])["varying"] == []
    varying = json.loads(
        gemsmith("report", *runs, "--json", "--varying", "lora.rank", "--varying", "optimizer.learning_rate")[1]
    )
    assert varying["varying"] == ["lora.rank", "optimizer.learning_rate"]


def test_a_single_runs_page_goes_where_it_is_told_to(gemsmith, demo_run, tmp_path):
    run = demo_run("a")
    assert gemsmith("report", run, "--html", tmp_path / "one.html")[:2] == (0, f"{tmp_path}/one.html\n")
    assert (tmp_path / "one.html").read_text().startswith("<!DOCTYPE html>") and not (run / "report.html").exists()


def test_the_paper_is_drawn_again(gemsmith, tmp_path):
    code, out, _ = gemsmith("report", "--paper", "--json")
    redrawn = json.loads(out)
    assert code == 0 and [side["name"] for side in redrawn["comparison"]["sides"]] == ["TPU", "GPU"]
    assert gemsmith("report", "--paper", "--html", tmp_path / "paper.html")[0] == 0
    assert "not so" in (tmp_path / "paper.html").read_text()
    assert "does not hold" in gemsmith("report", "--paper", "--md")[1]


def test_runs_are_put_beside_the_paper_in_every_form(gemsmith, demo_run, tmp_path):
    mine = demo_run("mine")
    redrawn = json.loads(gemsmith("report", "--paper", mine, "--hours", 3, "--json")[1])
    assert [side["name"] for side in redrawn["comparison"]["sides"]] == ["paper's TPU", "paper's GPU", "mine"]
    assert "training and 3 h of serving, on demand" in json.dumps(redrawn["comparison"]["pairs"][0])
    for form in ((), ("--md",), ("--csv",)):
        code, out, _ = gemsmith("report", "--paper", mine, *form)
        assert code == 0 and "paper's GPU" in out and "mine" in out
    assert gemsmith("report", "--paper", mine, "--html", tmp_path / "page.html")[0] == 0
    assert "<h2>mine against paper&#39;s GPU</h2>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SOURCE is missing; give a run directory"),
        (["a", "--md"], "--md: is for a comparison"),
        (["a", "--varying", "seed"], "--varying: is for a comparison"),
        (["a", "b", "--md", "--csv"], "--csv: does not go with --md"),
        (["a", "b", "--set", "seed=1"], "--run and --set: are for one SOURCE"),
        (["a", "b", "--varying", "sed"], "--varying sed: no run says that (did you mean seed?)"),
        (["a", "gone"], "run directory gone: holds no recipe.yaml"),
        (["a", "a"], "a: is given twice"),
        (["a", "b", "--trained-on", "v9"], "--trained-on v9: the plan of a does not have it"),
        (["--paper", "a", "--set", "seed=1"], "--set: does not go with --paper"),
        (["--paper", "--trained-on", "cpu"], "--trained-on and --served-on: are for runs compared with the paper"),
        (["--paper", "gone"], "run directory gone: holds no recipe.yaml"),
        (["--paper", "a", "--varying", "sed"], "--varying sed: no run says that (did you mean seed?)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_writes_nothing(gemsmith, demo_run, tmp_path, monkeypatch, arguments, message):
    for name in ("a", "b"):
        demo_run(name)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = gemsmith("report", *arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_record_of_another_version_is_refused_in_one_line(gemsmith, demo_run):
    a, b = demo_run("a"), demo_run("b")
    content = json.loads((b / "data.json").read_text())
    (b / "data.json").write_text(json.dumps(content | {"schema_version": 2}))
    code, _, err = gemsmith("report", a, b)
    assert code == 2 and "data.json: has schema_version 2" in err and err.count("\n") == 1


def test_the_page_of_a_run_with_a_damaged_record_is_written_with_a_warning(gemsmith, demo_run):
    run = demo_run("a")
    (run / "train.json").write_text("{")
    (run / "bench.json").unlink()  # what was never made is no damage
    code, out, err = gemsmith("report", run)
    assert code == 0 and out == f"{run}/report.html\n"
    assert err.startswith(f"report: warning: {run}/train.json: ") and err.count("\n") == 1


def test_runs_are_listed_in_both_forms(gemsmith, demo_run, tmp_path):
    speed = json.loads((demo_run("a") / "train.json").read_text())["real_tokens_per_s"]
    (demo_run("b") / "eval.json").unlink()
    code, out, _ = gemsmith("runs", tmp_path)
    assert code == 0 and "complete" in out and "stopped" in out and f"{speed:,.0f}" in out
    listed = json.loads(gemsmith("runs", tmp_path, "--sort", "name", "--reverse", "--json")[1])
    assert [(run["name"], run["state"]) for run in listed] == [("b", "stopped"), ("a", "complete")]
    assert [run["name"] for run in json.loads(gemsmith("runs", tmp_path, "--state", "stopped", "--json")[1])] == ["b"]
    code, _, err = gemsmith("runs", tmp_path / "gone")
    assert code == 2 and "is not a folder" in err
