"""The functions of `import gemsmith`, and the notebook that shows them."""

import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemsmith
from gemsmith.errors import DataError, InputError, RunError

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "plan_and_train.ipynb"


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint):
    file = tmp_path / "my.yaml"
    made = "{task: verilog, rows: 20}"
    file.write_text(f"checkpoint: {tiny_checkpoint('tiny-31b')}\ndata: {{train: {made}, max_length: 256}}\n")
    return file


def test_dir_shows_what_is_offered_and_no_more():
    offered = ["Recipe", "__version__", "load_model", "merge", "open_run", "plan_recipe", "run"]
    assert dir(gemsmith) == sorted(gemsmith.__all__) == offered
    assert all(getattr(gemsmith, name).__doc__ for name in offered)
    with pytest.raises(AttributeError, match="module 'gemsmith' has no attribute 'recpe'"):
        _ = gemsmith.recpe


def test_no_part_that_is_imported_later_replaces_what_is_offered():
    parts = {part.name for part in pkgutil.iter_modules(gemsmith.__path__)}
    assert len(parts) > 20 and not parts & set(gemsmith.__all__)


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
    planned = gemsmith.plan_recipe(gemsmith.Recipe.load(recipe).override({"hardware.machines": ["cpu"]}))
    assert [machine.name for machine in planned.machines] == ["cpu"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["my.yaml"]


def test_chosen_stages_run_and_their_records_are_read_again(recipe, tmp_path):
    records = gemsmith.run(gemsmith.Recipe.load(recipe), tmp_path / "run", stages=["plan", "data"])
    assert list(records) == ["plan", "data"] and records["data"].rows == 20
    there = gemsmith.open_run(tmp_path / "run")
    assert there.records == records
    assert not (there.path / ".lock").exists()
    again = gemsmith.run(there.recipe, there.path, stages=["data"])
    assert again == {"data": records["data"]}


def test_rows_in_memory_are_kept_and_others_need_another_run_directory(recipe, tmp_path):
    loaded, path = gemsmith.Recipe.load(recipe), tmp_path / "run"
    rows = [{"prompt": "one", "response": str(number)} for number in range(5)]
    record = gemsmith.run(loaded, path, rows=rows, stages=["data"])["data"]
    [file] = path.glob("rows-*.jsonl")
    assert record.rows == 5 and [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert gemsmith.open_run(path).recipe.data.train == str(file)
    assert record.provenance.inputs_sha256["data.train"]
    assert gemsmith.run(loaded, path, rows=(row for row in rows), stages=["data"])["data"] == record
    with pytest.raises(RunError, match=r"belongs to another recipe: data\.train is "):
        gemsmith.run(loaded, path, rows=rows[:2], stages=["data"])
    assert [*path.glob("rows-*.jsonl")] == [file]
    with pytest.raises(DataError, match=r"^rows: are not JSON \(Object of type bytes .*\); give texts"):
        gemsmith.run(loaded, tmp_path / "other", rows=[{"prompt": b"one"}])


def test_rows_in_memory_have_any_form_and_a_share_of_them_is_held_out(recipe, tmp_path):
    loaded = gemsmith.Recipe.load(recipe).override({"data.train": "mine.jsonl", "data.eval": "20%"})
    rows = [{"instruction": "add", "input": str(number), "output": str(number)} for number in range(50)]
    record = gemsmith.run(loaded, tmp_path / "run", rows=rows, stages=["data"])["data"]
    assert record.held_out.rows == record.dropped["held_out"] == 50 - record.rows > 0


def test_mistakes_are_one_line(recipe, tmp_path):
    with pytest.raises(InputError, match=r"stages: trian: is no stage \(did you mean train\?\); allowed: plan, data"):
        gemsmith.run(gemsmith.Recipe.load(recipe), tmp_path / "run", stages=["trian"])
    with pytest.raises(RunError, match=r"holds no recipe\.yaml"):
        gemsmith.open_run(tmp_path)


@pytest.mark.slow
def test_every_block_of_the_page_runs(recipe, tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.+?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    recipe.write_text(
        recipe.read_text() + "train: {max_steps: 2, global_batch_size: 2}\noptimizer: {warmup_steps: 0}\n"
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert names["losses"] == [step.loss for step in names["records"]["train"].steps] and len(names["losses"]) == 2
    assert capsys.readouterr().out.count("\n") == 3 + 1 + 1 + 2
    weights = [(tmp_path / folder / "merged" / "model-00001-of-00002.safetensors") for folder in ("runs/my", "tuned")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


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
