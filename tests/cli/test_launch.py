import json
from pathlib import Path

import pytest

from gemsmith.launch.provider import write_launch

WHERE = ("--provider", "cloud-run", "--project", "p", "--bucket", "gs://runs")


@pytest.fixture
def gpu_recipe(recipe):
    recipe.write_text(recipe.read_text() + "train: {backend: trl, max_steps: 10}\n")
    return recipe


def test_a_recipe_right_after_launch_is_started(gemsmith, gpu_recipe):
    code, out, err = gemsmith("launch", gpu_recipe, *WHERE, "--print", "out")
    assert code == 0 and out.split()[0] == "out/recipe.yaml" and "At most" in err, err
    assert Path("out/submit.sh").stat().st_mode & 0o100
    again = gemsmith("launch", "start", gpu_recipe, *WHERE, "--print", "out")
    assert again[:2] == (code, out)


def test_print_or_submit_must_be_chosen(gemsmith, gpu_recipe):
    for extra in ((), ("--print", "out", "--submit")):
        code, _, err = gemsmith("launch", gpu_recipe, *WHERE, *extra)
        assert code == 2 and "--print DIR or --submit: give one of them" in err


@pytest.mark.parametrize(
    ("option", "value"),
    [(name, value) for name in ("--timeout-hours", "--max-usd") for value in ("nan", "inf", "-inf", "-1")]
    + [("--timeout-hours", "0"), ("--timeout-hours", "1e300")],
)
def test_a_number_that_bounds_nothing_is_refused(gemsmith, gpu_recipe, option, value):
    code, _, err = gemsmith("launch", gpu_recipe, *WHERE, option, value, "--print", "out")
    assert code == 2 and option in err and "is not" in err and "Traceback" not in err and not Path("out").exists()


def test_what_does_not_fit_is_one_line_and_writes_nothing(gemsmith, gpu_recipe):
    code, _, err = gemsmith("launch", gpu_recipe, *WHERE, "--machine", "v5p-8", "--print", "out")
    assert (
        code == 2
        and err.startswith("error: --machine v5p-8: --provider cloud-run does not have it")
        and err.count("\n") == 1
        and not Path("out").exists()
    )


def test_a_launch_of_another_folder_is_one_line(gemsmith, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for verb in ("status", "logs", "fetch", "stop", "clean"):
        code, _, err = gemsmith("launch", verb, "gone")
        assert code == 2 and err.startswith("error: launch gone: launches/gone/launch.json does not exist"), err
    assert not Path("runs").exists()


def test_the_record_is_printed_as_json(gemsmith, tmp_path, monkeypatch, launch_record):
    monkeypatch.chdir(tmp_path)
    write_launch(launch_record)
    code, out, _ = gemsmith("launch", "status", "big", "--json")
    assert code == 0 and json.loads(out)["root"] == "gs://runs/big"


def test_fetch_brings_a_run_home(gemsmith, tmp_path, monkeypatch, launch_record):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store" / "run").mkdir(parents=True)
    (tmp_path / "store" / "run" / "recipe.yaml").write_text("x")
    write_launch(launch_record.model_copy(update={"root": f"file://{tmp_path}/store"}))
    code, out, err = gemsmith("launch", "fetch", "big")
    assert code == 0 and out == "runs/big: 1 files; next: gemsmith report runs/big\n", err


def test_the_machine_s_own_verb_runs_the_stages(gemsmith, gpu_recipe, tmp_path):
    store = tmp_path / "store" / "launched"
    store.mkdir(parents=True)
    (store / "recipe.yaml").write_text(gpu_recipe.read_text())
    code, _, err = gemsmith("launch", "worker", f"file://{store.parent}", "--folder", "work", "--stages", "plan")
    assert code == 0, err
    assert (store.parent / "run" / "plan.json").exists()


def test_a_report_of_a_launch_is_made_from_its_records_in_the_bucket(gemsmith, recipe, tmp_path):
    assert gemsmith("plan", recipe, "--run", "store/my/run")[0] == 0
    code, out, err = gemsmith("report", f"file://{tmp_path}/store/my")
    assert (code, out) == (0, "runs/my/report.html\n"), err
    assert sorted(path.name for path in Path("runs/my").glob("*.*")) == ["plan.json", "recipe.yaml", "report.html"]
