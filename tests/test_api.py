"""The functions of `import gemsmith`, and the notebook that shows them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gemsmith
from gemsmith.errors import InputError, RecipeError, RunError

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "plan_and_train.ipynb"


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint):
    file = tmp_path / "my.yaml"
    made = "{task: verilog, rows: 20}"
    file.write_text(f"checkpoint: {tiny_checkpoint('tiny-31b')}\ndata: {{train: {made}, max_length: 256}}\n")
    return file


def test_what_is_offered_is_there_and_says_what_it_does():
    for name in gemsmith.__all__:
        assert name == "__version__" or getattr(gemsmith, name).__doc__


def test_parts_that_are_imported_do_not_hide_the_functions():
    code = (
        "import gemsmith, gemsmith.runs.run, gemsmith.plan; assert callable(gemsmith.run_recipe), gemsmith.plan_recipe"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_gemsmith_loads_nothing_but_itself_and_its_version():
    code = "import sys; before = set(sys.modules); import gemsmith; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert [name for name in loaded if name.startswith("gemsmith")] == [
        "gemsmith",
        "gemsmith.system",
        "gemsmith.system.version",
    ]
    assert not set(loaded) & {"pydantic", "numpy", "jax", "rich", "yaml"}


def test_a_recipe_is_planned_without_a_run_directory(recipe, tmp_path):
    planned = gemsmith.plan_recipe(gemsmith.load_recipe(recipe, ["hardware.machines=[cpu]"]))
    assert [machine.name for machine in planned.machines] == ["cpu"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["my.yaml"]


def test_chosen_stages_run_and_their_records_are_read_again(recipe, tmp_path):
    records = gemsmith.run_recipe(recipe, path=tmp_path / "run", stages=["plan", "data"])
    assert list(records) == ["plan", "data"] and records["data"].rows == 20
    there = gemsmith.open_run(tmp_path / "run")
    assert gemsmith.read_records(there) == records
    assert not (there.path / ".lock").exists()


def test_mistakes_are_one_line(recipe, tmp_path):
    with pytest.raises(InputError, match=r"stages: 'trian' was given \(did you mean train\?\); allowed: plan, data"):
        gemsmith.run_recipe(recipe, path=tmp_path / "run", stages=["trian"])
    with pytest.raises(RecipeError, match=r"unknown key lora\.rnak"):
        gemsmith.load_recipe(recipe, ["lora.rnak=2"])
    with pytest.raises(RunError, match=r"holds no recipe\.yaml"):
        gemsmith.open_run(tmp_path)


@pytest.mark.slow
def test_the_notebook_runs_from_its_folder(monkeypatch, capsys):
    monkeypatch.chdir(NOTEBOOK.parent)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 4
    names: dict[str, object] = {}
    for text in code:
        exec(compile(text, NOTEBOOK.name, "exec"), names)
    records = names["records"]
    assert records["train"].steps[-1].step == 6 and records["train"].steps[-1].loss < records["train"].steps[0].loss
    assert "loss" in capsys.readouterr().out


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
