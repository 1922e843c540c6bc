"""Datasets of a source as data.train and data.eval."""

from pathlib import Path

import pytest
import yaml

from gemsmith.importers import port

FOLDER = Path(__file__).parent / "settings"
AXOLOTL = yaml.safe_load((FOLDER / "axolotl.yaml").read_text())
FACTORY = yaml.safe_load((FOLDER / "llama_factory.yaml").read_text())


def test_rows_that_must_be_changed_first_are_not_named_as_they_are(tmp_path, write, of):
    two = port([write(tmp_path, AXOLOTL | {"datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]})])
    renamed = port([write(tmp_path, AXOLOTL | {"datasets": [{"path": "a.jsonl", "field_messages": "turns"}]})])
    other = port([write(tmp_path, AXOLOTL | {"datasets": [{"path": "a.jsonl", "type": "alpaca_chat.load_qa"}]})])
    for ported in (two, renamed, other):
        assert of(ported.rows, "datasets[0].path").status == "to do"


@pytest.mark.parametrize(
    ("kind", "form"),
    [("chat_template", "messages"), ("sharegpt", "sharegpt"), ("alpaca", "alpaca"), ("completion", "text")],
)
def test_rows_that_are_read_as_they_are_get_their_format(kind, form, tmp_path, write, of):
    for dataset in ({"path": "a.json", "type": kind}, {"path": "json", "data_files": "a.json", "type": kind}):
        ported = port([write(tmp_path, AXOLOTL | {"datasets": [dataset]})])
        assert (ported.recipe.data.train, ported.recipe.data.format) == ("a.json", form)
        assert of(ported.rows, "datasets[0].path").status == "mapped"


def test_a_share_of_the_rows_is_held_out_by_the_recipe(tmp_path, write, of):
    ported = port([write(tmp_path, AXOLOTL | {"val_set_size": 0.05})])
    assert (ported.recipe.data.train, ported.recipe.data.eval) == ("chats.jsonl", "5%")
    assert of(ported.rows, "val_set_size").status == "mapped"


FACTORY_STEPS = FACTORY | {"eval_strategy": "steps", "eval_steps": 50, "val_size": 0.1}


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (AXOLOTL | {"val_set_size": 0.05, "eval_steps": 50}, 50),
        (AXOLOTL | {"val_set_size": 0.05, "eval_steps": 0.1}, None),
        (AXOLOTL | {"val_set_size": 0, "eval_steps": 50}, None),
        (AXOLOTL | {"val_set_size": 0.05, "eval_steps": 50, "eval_strategy": "epoch"}, None),
        (FACTORY_STEPS, 50),
        (FACTORY_STEPS | {"eval_strategy": None}, None),
        (FACTORY_STEPS | {"eval_strategy": False}, None),
    ],
    ids=["axolotl", "a share of steps", "none held out", "by epoch", "llama-factory", "off", "off in YAML"],
)
def test_losses_on_held_out_rows_are_as_far_apart(given, steps, tmp_path, write, of):
    ported = port([write(tmp_path, given)])
    assert ported.recipe.train.eval_steps == steps
    assert of(ported.rows, "eval_steps").status == ("mapped" if steps else "none")


@pytest.mark.parametrize(
    ("entry", "train", "form", "status"),
    [
        (
            {
                "file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"},
                "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                         "assistant_tag": "assistant"},
            },
            "{folder}/rows.jsonl", "messages", "mapped",
        ),
        ({"file_name": "rows.jsonl", "formatting": "sharegpt"}, "{folder}/rows.jsonl", "sharegpt", "mapped"),
        ({"file_name": "rows.jsonl", "formatting": "sharegpt", "tags": {"role_tag": "who"}}, "mine.jsonl", "messages",
         "to do"),
        ({"file_name": "rows.json"}, "{folder}/rows.json", "alpaca", "mapped"),
        ({"file_name": "rows.txt", "columns": {"prompt": "q"}}, "mine.jsonl", "alpaca", "to do"),
        ({"file_name": "rows.json", "columns": {"prompt": "q", "history": "h"}}, "mine.jsonl", "messages", "to do"),
    ],
)  # fmt: skip
def test_llama_factorys_description_of_a_dataset_decides_its_form(tmp_path, entry, train, form, status, write, of):
    write(tmp_path, {"mine": entry}, "dataset_info.json")
    settings = {key: value for key, value in FACTORY.items() if key != "max_samples"} | {
        "dataset": "mine",
        "dataset_dir": str(tmp_path),
    }
    ported = port([write(tmp_path, settings)])
    assert (ported.recipe.data.train, ported.recipe.data.format) == (train.format(folder=tmp_path), form)
    assert of(ported.rows, "dataset").status == status


def test_llama_factorys_names_of_columns_are_the_recipes(tmp_path, write):
    entry = {"file_name": "rows.json", "columns": {"prompt": "q", "query": "input", "response": "a"}}
    write(tmp_path, {"mine": entry}, "dataset_info.json")
    settings = {key: value for key, value in FACTORY.items() if key != "max_samples"}
    ported = port([write(tmp_path, settings | {"dataset": "mine", "dataset_dir": str(tmp_path)})])
    assert ported.recipe.data.columns == {"instruction": "q", "output": "a"}


def test_a_number_of_rows_that_is_text_is_held_out(tmp_path, write, of):
    ported = port([write(tmp_path, AXOLOTL | {"val_set_size": "500"})])
    assert of(ported.rows, "val_set_size").why == "move 500 of the rows out of data.train into chats-eval.jsonl"


def test_lists_where_a_name_is_usual_and_what_is_no_name_are_in_the_table(tmp_path, write):
    held_out = FACTORY | {"dataset": ["one", "two"], "val_size": 0.1, "eval_dataset": []}
    assert port([write(tmp_path, held_out)]).recipe.data.eval == "10%"
    assert [row.key for row in port([write(tmp_path, AXOLOTL | {"plugins": 3})]).differences] == ["plugins"]


@pytest.mark.parametrize("share", ["many", True, [1]])
def test_a_share_that_is_no_number_is_one_line(tmp_path, capsys, share, run, settings):
    assert run(settings(tmp_path, val_set_size=share)) == 2
    assert f"val_set_size is {share!r}; it must be a finite number" in capsys.readouterr().err
