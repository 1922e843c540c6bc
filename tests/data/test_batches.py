import hashlib

import numpy as np
import pytest

from gemsmith.data import batches
from gemsmith.data.batches import Batches, load_batches, open_rows
from gemsmith.data.packing import ARRAYS
from gemsmith.data.stage import prepare_data
from gemsmith.errors import DataError, RunError
from gemsmith.runs.records import DataRecord
from gemsmith.runs.run import read_record, write_record

ROWS = [{"prompt": f"add {number}", "response": f"wire {number}"} for number in range(21)]


@pytest.fixture
def prepared(make_run, write_rows):
    """Returns a run whose 21 rows each fill one packed row."""

    def make(train: dict, *, seed: int = 0, rows: list = ROWS, name: str = "run"):
        run = make_run(write_rows(*rows), {"max_length": 48, "packing": False}, train, seed=seed, name=name)
        prepare_data(run)
        return run

    return make


def row_hashes(batches: Batches) -> list[str]:
    """A hash of each real row, in the order in which they are trained on."""
    hashes = []
    for step in range(1, batches.steps + 1):
        batch = batches.batch(step)
        hashes += [hashlib.sha256(row.tobytes()).hexdigest() for row in batch.tokens[batch.segments.any(axis=1)]]
    return hashes


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(prepared):
    run = prepared({"epochs": 3, "global_batch_size": 8})
    batches = load_batches(run)
    assert batches.steps == 8  # ceil(3 * 21 / 8)
    seen = row_hashes(batches)
    stored = sorted(hashlib.sha256(row.tobytes()).hexdigest() for row in open_rows(run).tokens)
    epochs = [seen[begin : begin + 21] for begin in (0, 21, 42)]
    assert all(sorted(epoch) == stored for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != [hashlib.sha256(row.tobytes()).hexdigest() for row in open_rows(run).tokens]


def test_the_last_step_is_filled_up_with_rows_of_padding(prepared):
    batches = load_batches(prepared({"epochs": 1, "global_batch_size": 8}))
    last = batches.batch(3)
    assert last.tokens.shape == (8, 48)
    assert last.segments.any(axis=1).tolist() == [True] * 5 + [False] * 3
    assert not any(getattr(last, name)[5:].any() for name in ARRAYS)
    assert {name: getattr(last, name).dtype for name in ARRAYS} == ARRAYS


def test_a_batch_is_a_function_of_the_step_alone(prepared):
    run = prepared({"epochs": 2, "global_batch_size": 4})
    first, again = load_batches(run), load_batches(run)
    forward = [first.batch(step) for step in range(1, first.steps + 1)]
    for step in reversed(range(1, first.steps + 1)):
        later = again.batch(step)
        assert all(np.array_equal(getattr(forward[step - 1], name), getattr(later, name)) for name in ARRAYS)


def test_the_order_follows_the_seed_and_neighbouring_seeds_share_no_epoch(prepared):
    orders = []
    for seed in (0, 1):
        batches = load_batches(prepared({"epochs": 2, "global_batch_size": 21}, seed=seed, name=f"run{seed}"))
        seen = row_hashes(batches)
        orders += [tuple(seen[:21]), tuple(seen[21:])]
    assert len(set(orders)) == 4


def test_steps_of_the_recipe_go_on_into_further_epochs(prepared):
    batches = load_batches(prepared({"max_steps": 11, "global_batch_size": 4}))
    assert batches.steps == 11
    seen = row_hashes(batches)
    assert len(seen) == 44
    assert len(set(seen[:21])) == len(set(seen[21:42])) == 21


def test_a_step_of_all_rows_has_each_once_however_many_steps(prepared):
    batches = load_batches(prepared({"max_steps": 3, "global_batch_size": 21}))
    seen = row_hashes(batches)
    assert batches.steps == 3
    assert len(seen) == 63
    assert all(len(set(seen[begin : begin + 21])) == 21 for begin in (0, 21, 42))


def test_a_single_row_makes_a_batch(prepared):
    batches = load_batches(prepared({"global_batch_size": 1}, rows=ROWS[:1]))
    assert batches.steps == 1
    assert batches.batch(1).segments.any(axis=1).tolist() == [True]


def test_too_few_rows_for_one_step_are_refused(prepared):
    with pytest.raises(
        DataError,
        match=r"train.global_batch_size: 22 is more than all data makes, 21 packed rows of 48; set 21 or less",
    ):
        load_batches(prepared({"global_batch_size": 22}))


def test_some_rows_of_a_batch_are_those_of_the_whole(prepared):
    batches = load_batches(prepared({"epochs": 1, "global_batch_size": 8}))
    for step in (1, 3):  # 3 ends with padding
        whole, some = batches.batch(step), batches.batch(step, rows=[6, 1, 2])
        assert all(np.array_equal(getattr(some, name), getattr(whole, name)[[6, 1, 2]]) for name in ARRAYS)


def test_a_batch_does_not_change_the_stored_rows(prepared):
    run = prepared({"global_batch_size": 4})
    batches = load_batches(run)
    batches.batch(1).tokens[:] = 7
    assert not (batches.batch(1).tokens == 7).all()


def test_without_the_data_stage_the_command_to_run_is_named(make_run, write_rows):
    with pytest.raises(RunError, match=r"run first: gemsmith data"):
        load_batches(make_run(write_rows(*ROWS)))


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:300], lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), lambda whole: b""]
)
def test_an_array_that_is_not_what_was_written_is_named_with_the_command_that_mends_it(prepared, name, damage):
    run = prepared({})
    file = run.data / f"{name}.npy"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        RunError, match=rf"^{file}: is damaged: .*; write it again with: gemsmith data {run.path} --force$"
    ):
        load_batches(run)


def test_an_array_that_is_gone_is_named(prepared):
    run = prepared({})
    (run.data / "positions.npy").unlink()
    with pytest.raises(
        RunError, match=rf"positions\.npy: is missing; write it again with: gemsmith data {run.path} --force$"
    ):
        load_batches(run)


def test_a_record_that_contradicts_its_arrays_is_refused(prepared):
    run = prepared({})
    record = read_record(run, DataRecord)
    write_record(run, record.model_copy(update={"packed_rows": record.packed_rows + 1}))
    with pytest.raises(RunError, match=r"data\.json: is damaged: it says rows of shape .* --force"):
        load_batches(run)


def test_a_record_whose_hash_of_all_rows_is_another_is_refused(prepared):
    run = prepared({})
    write_record(run, read_record(run, DataRecord).model_copy(update={"rows_sha256": "0" * 64}))
    with pytest.raises(RunError, match=r"data\.json: is damaged: its rows_sha256 is not that of its files; .* --force"):
        load_batches(run)


def test_arrays_are_read_through_once_a_process(prepared, monkeypatch):
    run = prepared({})
    load_batches(run)
    monkeypatch.setattr(batches, "sha256_file", None)
    load_batches(run)
