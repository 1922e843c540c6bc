"""Several sources of rows, each taken as often as its weight says."""

from collections import Counter

import pytest

from gemsmith.data.batches import load_batches
from gemsmith.data.dataset import read_eval, read_train
from gemsmith.data.stage import prepare_data
from gemsmith.errors import DataError, RecipeError, RunError
from gemsmith.pipeline import run_stage
from gemsmith.recipe.load import build_recipe, dump_recipe, load_recipe
from gemsmith.runs.records import DataRecord
from gemsmith.runs.resolve import resolve_file
from gemsmith.runs.run import read_record
from gemsmith.tasks.messages import text_of


@pytest.fixture
def rows(write_rows):
    """Two files of one name: 10 rows a0 … a9, and 10 rows b0 … b9."""

    def pairs(letter: str) -> list[dict[str, str]]:
        return [{"prompt": f"{letter}{number}", "response": letter} for number in range(10)]

    first = write_rows(*pairs("a"), name="rows.jsonl")
    (first.parent / "more").mkdir()
    return first, write_rows(*pairs("b"), name="more/rows.jsonl")


def mixed(rows, first: float, second: float) -> list[dict[str, object]]:
    return [{"path": str(rows[0]), "weight": first}, {"path": str(rows[1]), "weight": second}]


def prompts(found) -> Counter[str]:
    return Counter(text_of(document.messages[0]) for document in found.documents)


def test_an_epoch_takes_each_row_as_often_as_its_weight_and_the_seed_draws_the_rest(rows):
    def read(seed: int):
        data = {"train": mixed(rows, 2, 0.5)}
        return read_train(build_recipe({"checkpoint": "x/y", "data": data, "seed": seed}), None)

    found = prompts(read(0))
    assert {name: count for name, count in found.items() if name[0] == "a"} == {f"a{number}": 2 for number in range(10)}
    assert sum(name[0] == "b" for name in found) == 5 and {*found.values()} == {1, 2}
    assert prompts(read(0)) == found != prompts(read(1))
    assert read(0).sources == {str(rows[0]): 20, str(rows[1]): 5}
    assert {document.origin for document in read(0).documents} >= {
        "data.train[0], rows.jsonl line 1",
        "data.train[0], rows.jsonl line 10",
    }


def test_a_share_is_held_out_of_each_source_whatever_its_weight(rows):
    values = {"checkpoint": "x/y", "data": {"train": mixed(rows, 3, 1), "held_out": 0.5}}
    recipe = build_recipe(values | {"data": values["data"] | {"eval": mixed(rows, 3, 1)}})
    trained, held_out = prompts(read_train(recipe, None)), prompts(read_eval(recipe))
    assert not trained.keys() & held_out.keys() and len(trained) + len(held_out) == 20
    assert {*held_out.values()} == {1} and {name[0] for name in held_out} == {"a", "b"}


def test_the_record_counts_the_sources_and_the_rows_follow_from_the_seed(rows, make_run):
    run, again = (make_run(mixed(rows, 2, 0.5), train={"global_batch_size": 1}, name=name) for name in ("one", "two"))
    record = prepare_data(run)
    assert record.sources == {str(rows[0]): 20, str(rows[1]): 5} and record.rows == 25
    assert prepare_data(again).rows_sha256 == record.rows_sha256
    assert read_record(run, DataRecord).sources == record.sources
    assert load_batches(run).total_rows == record.packed_rows
    rows[1].write_text(rows[0].read_text())
    with pytest.raises(RunError, match=r"^data.train: .*rows.jsonl, .*more/rows.jsonl has changed since"):
        run_stage(run, "data")


def test_paths_count_from_the_recipe_and_a_share_is_of_all_sources(rows, tmp_path, checkpoint):
    file = tmp_path / "my.yaml"
    data = "{train: [{path: rows.jsonl, weight: 2}, {path: more}], eval: 50%}"
    file.write_text(f"checkpoint: {checkpoint}\ndata: {data}\n")
    recipe, _ = resolve_file(file)
    assert [(one.path, one.weight) for one in recipe.data.train] == [
        (str(rows[0]), 2.0),
        (str(rows[1].parent), 1.0),
    ]
    assert recipe.data.eval == recipe.data.train and recipe.data.held_out == 0.5
    file.write_text(dump_recipe(recipe))
    assert load_recipe(file) == recipe


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ([{"pth": "a"}], r"unknown key data.train.0.pth \(did you mean path\?\); allowed there: path, weight"),
        ([{"path": "a", "weight": 0}], r"data.train.0.weight: 0 was given, input should be greater than 0"),
        (["a.jsonl"], r"data.train.0: 'a.jsonl' was given, it must be a mapping of keys to values"),
        ([{"weight": 1}], r"data.train.0.path is missing"),
    ],
)
def test_what_is_no_source_is_refused_in_one_line(train, said):
    with pytest.raises(RecipeError, match=said):
        build_recipe({"checkpoint": "x/y", "data": {"train": train}})


def test_weights_that_leave_no_row_are_refused(rows):
    recipe = build_recipe({"checkpoint": "x/y", "data": {"train": mixed(rows, 0.01, 0.01)}})
    with pytest.raises(DataError, match=r"^data.train: its weights leave no row; raise one"):
        read_train(recipe, None)
