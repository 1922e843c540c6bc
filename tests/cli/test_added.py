import json

import pytest

from gemsmith.cli.serve import add_task
from gemsmith.errors import InputError, RecipeError
from gemsmith.recipe.load import load_recipe


@pytest.fixture
def recipe(tmp_path):
    def write(more: str = ""):
        file = tmp_path / "my.yaml"
        made = "{task: verilog, rows: 3}"
        file.write_text(
            f"checkpoint: x\ndata: {{train: {made}, eval: {made}}}\neval: {{scorer: verilog-exact{more}}}\n"
        )
        return file

    return write


def added(file, given, tmp_path):
    override = add_task(file, [], {"task": "verilog", "dataset": tmp_path, **given})
    return override, load_recipe(file, [override]).eval.tasks


def test_a_task_is_added_behind_the_held_out_rows_that_the_recipe_scores(recipe, tmp_path):
    _, (rows, verilog) = added(recipe(), {"samples": 3, "temperature": 0.0}, tmp_path)
    assert (rows.task, rows.dataset) == ("verilog-exact", None)
    assert (verilog.task, verilog.dataset, verilog.samples, verilog.temperature) == ("verilog", str(tmp_path), 3, 0.0)


def test_a_task_that_is_there_is_not_added_again_and_one_with_other_settings_is(recipe, tmp_path):
    file = recipe(f", tasks: [{{task: verilog, dataset: {tmp_path}}}]")
    assert len(added(file, {}, tmp_path)[1]) == 1
    assert len(added(file, {"prompt": "fenced"}, tmp_path)[1]) == 2


def test_a_prompt_file_is_seen_from_where_the_verb_is_run_and_a_name_is_none(recipe, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert added(recipe(), {"prompt": "my.txt"}, tmp_path)[1][-1].prompt == str(tmp_path / "here" / "my.txt")
    assert added(recipe(), {"prompt": "paper"}, tmp_path)[1][-1].prompt == "paper"
    with pytest.raises(
        RecipeError, match=r"eval\.tasks\.1\.prompt: kind was given; verilog has official, fenced, paper"
    ):
        added(recipe(), {"prompt": "kind"}, tmp_path)


def test_a_run_directory_has_its_recipe_in_it(recipe, tmp_path):
    recipe().rename(tmp_path / "recipe.yaml")
    override = add_task(tmp_path, [], {"task": "verilog", "dataset": tmp_path})
    assert [task["task"] for task in json.loads(override.removeprefix("eval.tasks="))] == ["verilog-exact", "verilog"]


def test_options_that_do_not_go_together_are_refused(recipe, tmp_path):
    for given, said in (
        ({"task": "verilog"}, "--dataset is missing"),
        ({"unsafe": True, "dataset": tmp_path}, "--task is missing; --unsafe, --dataset must come with it"),
    ):
        with pytest.raises(InputError, match=said):
            add_task(recipe(), [], given)
    with pytest.raises(RecipeError, match="cannot be read"):
        add_task(tmp_path / "none.yaml", [], {"task": "verilog", "dataset": tmp_path})
