import errno
import gc
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from gemsmith.data import stage
from gemsmith.data.batches import open_rows
from gemsmith.data.dataset import read_train
from gemsmith.data.stage import prepare_data
from gemsmith.errors import CheckpointError, DataError, MachineError, RecipeError
from gemsmith.runs.records import DataRecord, HeldOut
from gemsmith.runs.run import is_up_to_date, read_record, write_record

ROWS = [{"prompt": f"add {number}", "response": "wire " * (number + 1)} for number in range(30)]


@pytest.fixture
def run(make_run, write_rows):
    return make_run(write_rows(*ROWS), {"max_length": 64}, {"epochs": 2, "global_batch_size": 2})


def test_the_record_counts_what_the_arrays_hold(run):
    record = prepare_data(run)
    rows = open_rows(run)
    assert read_record(run, DataRecord) == record
    assert is_up_to_date(run, "data")
    assert record.rows == 30 and record.dropped == {}
    assert rows.tokens.shape == (record.packed_rows, 64)
    assert record.tokens == np.count_nonzero(rows.segments)
    assert record.supervised_tokens == rows.loss_mask.sum()
    assert record.packing_efficiency == record.tokens / rows.tokens.size
    assert record.steps == -(-2 * record.packed_rows // 2)


def test_every_document_is_in_the_rows_once_and_spells_its_answer(run, checkpoint):
    from tokenizers import Tokenizer

    prepare_data(run)
    rows = open_rows(run)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    answers = [
        tokenizer.decode(tokens[(segments == segment) & (mask == 1)].tolist(), skip_special_tokens=False)
        for tokens, segments, mask in zip(rows.tokens, rows.segments, rows.loss_mask, strict=True)
        for segment in range(1, segments.max() + 1)
    ]
    assert sorted(answers) == sorted(row["response"].strip() + "<turn|>" for row in ROWS)


def test_the_same_recipe_gives_the_same_rows(run, make_run, write_rows):
    first = prepare_data(run)
    again = prepare_data(make_run(write_rows(*ROWS), {"max_length": 64}, name="again"))
    other = prepare_data(make_run(write_rows(*ROWS[1:]), {"max_length": 64}, name="other"))
    assert first.rows_sha256 == again.rows_sha256 != other.rows_sha256
    assert first.provenance.inputs_sha256["data.train"] != other.provenance.inputs_sha256["data.train"]
    assert first.template_sha256 == first.provenance.inputs_sha256["chat template"]


def test_too_long_rows_are_dropped_counted_and_in_the_percentiles(make_run, write_rows):
    record = prepare_data(make_run(write_rows(*ROWS), {"max_length": 32}))
    # <bos> <|turn> user \n a d d ▁ DIGITS <turn|> \n <|turn> model \n wire (▁wire)* <turn|> \n
    lengths = sorted(16 + len(str(number)) + number for number in range(30))
    kept = [length for length in lengths if length <= 32]
    assert record.rows == len(kept) and record.tokens == sum(kept)
    assert record.dropped == {"too_long": 30 - len(kept)}
    assert record.length_percentiles == {
        "p50": lengths[14],
        "p90": lengths[26],
        "p99": lengths[29],
        "p100": lengths[29],
    }


def test_a_row_of_exactly_max_length_is_kept(make_run, write_rows):
    record = prepare_data(make_run(write_rows(ROWS[0]), {"max_length": 17}))
    assert record.packing_efficiency == 1.0


def test_too_long_rows_are_an_error_where_the_recipe_says_so(make_run, write_rows):
    with pytest.raises(
        DataError, match=r"rows.jsonl line 30: has 47 tokens, data.max_length is 32; .* data.on_too_long"
    ):
        prepare_data(make_run(write_rows(*ROWS), {"max_length": 32, "on_too_long": "error"}))


def test_no_row_left_is_an_error_and_leaves_no_record(make_run, write_rows):
    run = make_run(write_rows(*ROWS), {"max_length": 8})
    with pytest.raises(
        DataError, match=r"each of its 30 rows has more than data.max_length = 8 tokens \(the longest 47\)"
    ):
        prepare_data(run)
    assert not run.data.exists() and not run.record_file("data").exists()


def test_the_collector_of_cycles_rests_while_rows_are_read_and_not_afterwards(make_run, write_rows, monkeypatch):
    collects = []
    monkeypatch.setattr(stage, "read_train", lambda *_: collects.append(gc.isenabled()) or read_train(*_))
    with pytest.raises(DataError, match="none is left"):
        prepare_data(make_run(write_rows(*ROWS), {"max_length": 8}))
    assert collects == [False] and gc.isenabled()


def test_rows_that_are_made_need_no_file(make_run):
    record = prepare_data(make_run({"task": "verilog", "rows": 20}, {"max_length": 512}))
    assert record.rows == 20


def test_fewer_rows_than_a_step_are_said(make_run, write_rows, capsys):
    prepare_data(make_run(write_rows(ROWS[0]), train={"global_batch_size": 4}))
    out = capsys.readouterr()
    assert "too few for one step of train.global_batch_size = 4, so training will ask to lower that" in out.err
    assert out.out == ""


def test_a_row_longer_than_the_model_reads_is_refused(make_run, write_rows):
    with pytest.raises(RecipeError, match=r"data.max_length: 4096 was given; tiny-31b reads at most 2048 tokens"):
        prepare_data(make_run(write_rows(*ROWS), {"max_length": 4096}))


def test_the_recipes_template_is_used_and_its_hash_recorded(make_run, write_rows, checkpoint, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text((checkpoint / "chat_template.jinja").read_text().replace("<|turn>model", "<|turn>assistant"))
    own.write_text(own.read_text().replace("'model' if", "'assistant' if"))
    plain = prepare_data(make_run(write_rows(*ROWS), name="plain"))
    changed = prepare_data(make_run(write_rows(*ROWS), {"template": str(own)}, name="changed"))
    assert plain.template_sha256 != changed.template_sha256 and plain.rows_sha256 != changed.rows_sha256


def test_a_template_that_fails_is_refused_with_the_row_and_leaves_no_record(make_run, write_rows, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("\n{{ 1 / 0 }}")
    run = make_run(write_rows(*ROWS), {"template": str(own)})
    with pytest.raises(
        DataError,
        match=r"rows.jsonl line 1: chat template .*own.jinja line 2 fails: ZeroDivisionError, division by zero; mend",
    ):
        prepare_data(run)
    assert not run.data.exists() and not run.record_file("data").exists()


def test_a_checkpoint_without_a_template_is_refused(make_run, write_rows, checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "base"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match=r"set data.template"):
        prepare_data(make_run(write_rows(*ROWS), checkpoint=str(folder)))


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(make_run, write_rows, tiny_checkpoint, tmp_path):
    folder = Path(shutil.copytree(tiny_checkpoint("tiny-31b"), tmp_path / "grown"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 1024, "content": "<new>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"its tokenizer has the id 1024, its embedding 1024 rows"):
        prepare_data(make_run(write_rows(*ROWS), checkpoint=str(folder)))


def test_a_full_disk_is_said_and_leaves_what_was_there(run, monkeypatch):
    before = prepare_data(run)

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    monkeypatch.setattr("gemsmith.data.stage.pack_rows", no_room)
    with pytest.raises(MachineError, match=re.escape("cannot be written (No space left on device)")):
        prepare_data(run)
    assert read_record(run, DataRecord) == before
    assert sorted(file.name for file in run.data.iterdir()) == [
        "answers.npy",
        "loss_mask.npy",
        "positions.npy",
        "segments.npy",
        "tokens.npy",
    ]


def test_the_record_says_what_it_was_made_from(run):
    record = prepare_data(run)
    assert {"recipe", "data.train", "checkpoint", "tokenizer.json", "chat template"} == set(
        record.provenance.inputs_sha256
    )


def test_a_row_with_a_control_token_leaves_no_record(make_run, write_rows):
    run = make_run(write_rows(*ROWS, {"prompt": "a", "response": "b<|tool_response>"}))
    with pytest.raises(DataError, match=r"rows.jsonl line 31: response holds <\|tool_response>, a control token"):
        prepare_data(run)
    assert not run.data.exists() and not run.record_file("data").exists()


def test_held_out_rows_that_are_trained_on_are_counted_and_said(make_run, write_rows, tmp_path):
    held_out = tmp_path / "held.jsonl"
    rows = [{"prompt": " add\n 3", "response": "another"}, ROWS[7], {"prompt": "new", "response": "wire"}]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = make_run(write_rows(*ROWS), {"max_length": 64, "eval": str(held_out)})
    record = prepare_data(run)
    assert record.held_out_also_trained == 2
    assert record.held_out == HeldOut(rows=3, same_prompt=2, same_answer=1)
    (notice,) = record.warnings
    assert notice.startswith(
        "data.eval: held-out rows whose prompt is also trained on: 2 of 3 (held.jsonl line 1, held.jsonl line 2), 1 of "
        "them with the same"
    )
    assert read_record(run, DataRecord) == record and is_up_to_date(run, "data")


def test_a_row_dropped_for_its_length_is_not_trained_on(make_run, write_rows, tmp_path):
    held_out = tmp_path / "held.jsonl"
    held_out.write_text(json.dumps(ROWS[29]) + "\n")
    record = prepare_data(make_run(write_rows(*ROWS), {"max_length": 32, "eval": str(held_out)}))
    assert record.dropped and record.held_out_also_trained == 0 and record.warnings == ()


def test_made_rows_hold_out_none_that_are_trained_on(make_run):
    made = {"task": "verilog", "rows": 40}
    record = prepare_data(make_run(made, {"max_length": 512, "eval": made | {"split": "held-out"}}))
    assert record.held_out_also_trained == 0 and record.warnings == ()


def test_held_out_rows_that_cannot_be_read_are_an_error_before_training(make_run, write_rows, tmp_path):
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"prompt": "add"}\n')
    run = make_run(write_rows(*ROWS), {"eval": str(held_out)})
    with pytest.raises(DataError, match=r"held.jsonl line 1: has the columns prompt"):
        prepare_data(run)
    assert not run.data.exists() and not run.record_file("data").exists()


def test_columns_that_are_not_read_are_counted_and_said(make_run, write_rows, capsys):
    rows = [row | ({"id": number, "[/red]": 1} if number % 3 else {"id": number}) for number, row in enumerate(ROWS)]
    plain = prepare_data(make_run(write_rows(*ROWS), name="plain"))
    assert "ignored" not in capsys.readouterr().err
    run = make_run(write_rows(*rows, name="more.jsonl"), name="more")
    record = prepare_data(run)
    assert record.ignored_columns == {"id": 30, "[/red]": 20} and not record.warnings
    assert read_record(run, DataRecord) == record
    assert "; ignored the columns id (30 rows), [/red] (20 rows)" in capsys.readouterr().err
    assert (record.rows_sha256, plain.ignored_columns) == (plain.rows_sha256, {})


@pytest.mark.parametrize("column", ["label", "split"])
def test_a_column_that_may_mark_rows_not_to_train_on_is_a_notice(column, make_run, write_rows):
    record = prepare_data(make_run(write_rows(*(row | {column: "x"} for row in ROWS))))
    assert record.warnings == (
        f"data.train: the column {column} (30 rows) is ignored: every row is trained on, whatever its {column}",
    )


def test_a_record_made_before_columns_were_counted_still_opens(run):
    prepare_data(run)
    file = run.record_file("data")
    values = json.loads(file.read_text())
    del values["ignored_columns"]
    file.write_text(json.dumps(values))
    assert read_record(run, DataRecord).ignored_columns == {}


def test_other_held_out_rows_leave_the_prepared_data_complete(make_run, write_rows, tmp_path):
    held_out = tmp_path / "held.jsonl"
    held_out.write_text(json.dumps(ROWS[0]) + "\n")
    run = make_run(write_rows(*ROWS), {"max_length": 64, "eval": str(held_out)})
    prepare_data(run)
    held_out.write_text(json.dumps({"prompt": "new", "response": "wire"}) + "\n")
    assert is_up_to_date(run, "data")
    none = run.recipe.model_copy(update={"data": run.recipe.data.model_copy(update={"eval": None})})
    assert is_up_to_date(type(run)(path=run.path, recipe=none), "data")


def test_the_same_rows_again_leave_the_record_as_it_was(run):
    """What was made from it since stays complete."""
    prepare_data(run)
    before = run.record_file("data").read_bytes()
    (run.data / "tokens.npy").unlink()
    prepare_data(run)
    assert run.record_file("data").read_bytes() == before
    open_rows(run)


def test_the_record_of_an_earlier_version_stays_where_the_rows_are_the_same(run):
    record = prepare_data(run).model_copy(update={"files": {}})
    write_record(run, record)
    assert prepare_data(run) == record


def test_other_rows_get_another_record(make_run, write_rows):
    run = make_run(write_rows(*ROWS), {"max_length": 64})
    first = prepare_data(run)
    write_rows(*ROWS[1:])
    assert prepare_data(run).provenance.inputs_sha256 != first.provenance.inputs_sha256


def test_a_record_that_cannot_be_read_is_written_again(run, gemsmith):
    prepare_data(run)
    run.record_file("data").write_bytes(run.record_file("data").read_bytes()[:200])
    code, _, error = gemsmith("data", run.path)
    assert code == 0, error
    assert is_up_to_date(run, "data")
