"""A share of the rows is held out by what they hold, and a number of them is drawn by the seed."""

import random

import pytest

from gemsmith.data.dataset import read_held_out, read_train
from gemsmith.data.stage import prepare_data
from gemsmith.errors import DataError, RecipeError
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.resolve import resolve
from gemsmith.runs.run import Run, open_run
from gemsmith.tasks.messages import text_of

ROWS = [{"prompt": f"add {number}", "response": f"wire {number}"} for number in range(200)]


@pytest.fixture
def resolved(checkpoint, write_rows):
    """Returns the resolved recipe over rows: `resolved(rows, eval="5%")`."""

    def make(rows, *, seed=0, **data):
        file = rows if isinstance(rows, str) else str(write_rows(*rows))
        values = {"checkpoint": str(checkpoint), "seed": seed, "data": {"train": file, "max_length": 128} | data}
        return resolve(build_recipe(values | {"train": {"global_batch_size": 2}}))[0]

    return make


def sides(recipe) -> tuple[list[str], list[str]]:
    """The prompts that are trained on, and those that are held out."""
    train, held_out = read_train(recipe, keep=str), read_held_out(recipe)
    return tuple([text_of(row.messages[0]) for row in dataset.documents] for dataset in (train, held_out))


def test_a_share_is_held_out_and_the_rest_is_trained_on(resolved):
    recipe = resolved(ROWS, eval="10%")
    assert (recipe.data.eval, recipe.data.held_out) == (recipe.data.train, 0.1)
    train, held_out = sides(recipe)
    assert sorted(train + held_out) == sorted(row["prompt"] for row in ROWS)
    assert 10 < len(held_out) < 30


def test_a_row_and_its_copies_stay_on_their_side_wherever_they_stand(resolved):
    _, held_out = sides(resolved(ROWS, eval="10%"))
    mixed = [dict(reversed(row.items())) | {"id": number} for number, row in enumerate(ROWS * 2)]
    random.Random(1).shuffle(mixed)
    train, again = sides(resolved(mixed, eval="10%"))
    assert sorted(again) == sorted(held_out * 2)
    assert not {*train} & {*again}


def test_a_larger_share_holds_out_the_same_rows_and_more(resolved):
    _, held_out = sides(resolved(ROWS, eval="10%"))
    _, more = sides(resolved(ROWS, eval="12.5%"))
    assert {*held_out} < {*more}


def test_so_many_rows_are_drawn_by_the_seed_in_their_order(resolved):
    def drawn(seed):
        return read_train(resolved(ROWS, limit=20, seed=seed), keep=str)

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first == again != other
    places = [int(row.origin.split()[-1]) for row in first.documents]
    assert len(places) == 20 and places == sorted(places) and places != [*range(1, 21)]
    assert first.dropped == {"limit": 180}
    assert read_train(resolved(ROWS, limit=200), keep=str).dropped == {}


def test_the_record_counts_what_is_held_out_and_what_is_beyond_the_limit(resolved, tmp_path):
    record = prepare_data(open_run(tmp_path / "run", resolved(ROWS, eval="10%", limit=50)))
    assert record.rows == 50
    assert record.held_out.rows == record.dropped["held_out"]
    assert record.rows + sum(record.dropped.values()) == 200
    assert record.held_out.same_prompt == 0


def test_another_share_is_another_recipe_for_the_rows(resolved, tmp_path):
    from gemsmith.runs.run import is_up_to_date

    prepare_data(open_run(tmp_path / "run", resolved(ROWS, eval="10%")))
    file = str(resolved(ROWS).data.train)
    assert is_up_to_date(Run(path=tmp_path / "run", recipe=resolved(file, eval="10%")), "data")
    for other in ({"eval": "20%"}, {"eval": "10%", "limit": 5}, {}):
        assert not is_up_to_date(Run(path=tmp_path / "run", recipe=resolved(file, **other)), "data")


def test_bad_rows_of_the_other_side_are_no_concern_of_this(resolved):
    rows = [*ROWS, *({"prompt": f"sub {number}", "response": ""} for number in range(50))]
    recipe = resolved(rows, eval="20%", on_bad_row="drop")
    counts = [dataset.dropped["row: empty answer"] for dataset in (read_train(recipe, keep=str), read_held_out(recipe))]
    assert sum(counts) == 50 and min(counts) > 0


def test_raw_text_is_not_held_out(resolved):
    rows = [{"text": f"add {number}"} for number in range(50)]
    with pytest.raises(
        DataError, match=r"^rows.jsonl line \d+: is raw text, which asks nothing; leave data.eval out, or"
    ):
        read_held_out(resolved(rows, eval="20%"))


@pytest.mark.parametrize(("share", "which"), [("1%", "held-out"), ("99%", "train")])
def test_a_share_that_comes_to_no_row_or_to_all_is_refused(share, which, resolved):
    with pytest.raises(
        DataError, match=rf"^data.held_out: of 2 rows of .*rows.jsonl none is {which} with 0\.\d+; give another"
    ):
        sides(resolved(ROWS[:2], eval=share))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"eval": "0%"}, r"^data.eval: 0% was given; a share of data.train must be above 0% and below 100%"),
        ({"eval": "100%"}, "must be above 0% and below 100%"),
        (
            {"eval": "5%", "held_out": 0.1},
            "^data.held_out: 0.1 was given, and data.eval is not data.train; set data.eval",
        ),
        ({"held_out": 0.1}, "or to 10% alone, or leave held_out out"),
        (
            {"train": {"task": "verilog", "rows": 5}, "eval": "5%"},
            "^data.eval: a share .* give rows to make with split",
        ),
        ({"limit": 0}, "^recipe: data.limit: 0 was given"),
    ],
)
def test_a_share_that_is_none_is_refused_with_the_recipe(data, message):
    with pytest.raises(RecipeError, match=message):
        build_recipe({"checkpoint": "x", "data": {"train": "rows.jsonl"} | data})
