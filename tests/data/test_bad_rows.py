"""All rows that cannot be used are told at once, or left out and counted."""

import json
import pickle

import pytest

from gemsmith.data.dataset import read_dataset
from gemsmith.data.stage import prepare_data
from gemsmith.errors import DataError, RowError
from gemsmith.recipe.schema import Data

GOOD = {"prompt": "add", "response": "wire"}
EMPTY = {"prompt": "add", "response": " "}
FORGED = {"prompt": "add", "response": "a<turn|>"}


@pytest.fixture
def mixed(tmp_path):
    """Twelve lines of which seven cannot be used, for three reasons."""
    lines = [json.dumps(row) for row in (GOOD, EMPTY, GOOD, EMPTY, EMPTY, GOOD, EMPTY)]
    lines += ["{", json.dumps({"messages": []}), json.dumps(GOOD), "[", json.dumps(GOOD)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path / "rows.jsonl"


def test_every_bad_row_is_counted_by_kind_in_one_line_that_begins_with_the_first(mixed):
    with pytest.raises(DataError) as error:
        read_dataset(str(mixed), data=Data(train="-", on_bad_row="error"))
    assert str(error.value) == (
        "rows.jsonl line 2: response is an empty answer; fill it, or take the row out; 7 of 12 rows cannot be used "
        "(empty answer: 4 (rows.jsonl line 2, rows.jsonl line 4, rows.jsonl line 5 and 1 more); not JSON: 2 "
        "(rows.jsonl line 8, rows.jsonl line 11); another form: 1 (rows.jsonl line 9)); or set data.on_bad_row to drop"
    )


def test_one_bad_row_is_told_as_it_is_where_no_recipe_asks(write_rows):
    with pytest.raises(
        DataError, match=r"^rows.jsonl line 2: response is an empty answer; fill it, or take the row out$"
    ):
        read_dataset(str(write_rows(GOOD, EMPTY)))


def test_bad_rows_are_left_out_and_counted_where_the_recipe_says_so(mixed):
    dataset = read_dataset(str(mixed), data=Data(train="-", on_bad_row="drop"))
    assert len(dataset.documents) == 5
    assert dataset.dropped == {"row: empty answer": 4, "row: not JSON": 2, "row: another form": 1}
    (warning,) = dataset.warnings
    assert warning.startswith(
        "data.train: rows left out that cannot be used: 7 of 12 (empty answer: 4 (rows.jsonl line"
    )


def test_a_row_left_out_does_not_decide_the_form_of_the_others(write_rows):
    dataset = read_dataset(str(write_rows({"messages": "a"}, GOOD, GOOD)), data=Data(train="-", on_bad_row="drop"))
    assert (len(dataset.documents), dataset.dropped) == (2, {"row: not a list": 1})


@pytest.mark.parametrize("wanted", ["error", "drop"])
def test_where_every_row_is_bad_none_is_left(wanted, write_rows):
    with pytest.raises(DataError, match=r"line 1: .* 2 of 2 rows cannot be used \(.*\); so none is left$"):
        read_dataset(str(write_rows(EMPTY, EMPTY)), data=Data(train="-", on_bad_row=wanted))


def test_rows_that_cannot_be_rendered_are_counted_beside_those_that_cannot_be_read(make_run, write_rows):
    rows = write_rows(GOOD, EMPTY, FORGED, GOOD)
    record = prepare_data(make_run(rows, {"on_bad_row": "drop"}, {"global_batch_size": 1}))
    assert record.rows == 2
    assert record.dropped == {"row: empty answer": 1, "row: control token": 1}
    assert [warning.partition(" (")[0] for warning in record.warnings] == [
        "data.train: rows left out that cannot be used: 1 of 4",
        "data.train: rows left out that cannot be used: 1 of 3",
    ]


def test_all_rows_that_cannot_be_rendered_are_told_at_once(make_run, write_rows):
    with pytest.raises(
        DataError, match=r"^rows.jsonl line 1: response holds <turn\|>.*; 2 of 3 rows cannot be used \("
    ):
        prepare_data(make_run(write_rows(FORGED, GOOD, FORGED), None, {"global_batch_size": 1}))


def test_a_bad_row_is_told_from_another_process_as_it_was():
    error = pickle.loads(pickle.dumps(RowError("kind", "line 1: is bad")))
    assert (error.kind, str(error)) == ("kind", "line 1: is bad")
