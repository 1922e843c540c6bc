import errno
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from gemsmith.data import prepare_data
from gemsmith.data.batches import open_rows
from gemsmith.errors import CheckpointError, DataError, MachineError, RecipeError
from gemsmith.run import is_complete, read_record

ROWS = [{"prompt": f"add {number}", "response": "wire " * (number + 1)} for number in range(30)]


@pytest.fixture
def run(make_run, write_rows):
    return make_run(write_rows(*ROWS), {"max_length": 64}, {"epochs": 2, "rows_per_step": 2})


def test_the_record_counts_what_the_arrays_hold(run):
    record = prepare_data(run)
    rows = open_rows(run.data)
    assert read_record(run, "data") == record
    assert is_complete(run, "data")
    assert record.rows == 30 and record.dropped == {}
    assert rows.tokens.shape == (record.packed_rows, 64)
    assert record.tokens == np.count_nonzero(rows.segments)
    assert record.supervised_tokens == rows.loss_mask.sum()
    assert record.packing_efficiency == record.tokens / rows.tokens.size
    assert record.steps == -(-2 * record.packed_rows // 2)


def test_every_document_is_in_the_rows_once_and_spells_its_answer(run, checkpoint):
    from tokenizers import Tokenizer

    prepare_data(run)
    rows = open_rows(run.data)
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
    assert first.origin.made_from["data.train"] != other.origin.made_from["data.train"]
    assert first.template_sha256 == first.origin.made_from["chat template"]


def test_too_long_rows_are_dropped_counted_and_in_the_percentiles(make_run, write_rows):
    record = prepare_data(make_run(write_rows(*ROWS), {"max_length": 32}))
    # <bos> <|turn> user \n a d d ▁ DIGITS <turn|> \n <|turn> model \n wire (▁wire)* <turn|> \n
    lengths = sorted(16 + len(str(number)) + number for number in range(30))
    kept = [length for length in lengths if length <= 32]
    assert record.rows == len(kept) and record.tokens == sum(kept)
    assert record.dropped == {"too_long": 30 - len(kept)}
    assert record.length_percentiles == {"p50": lengths[14], "p90": lengths[26], "p99": lengths[29], "p100": lengths[29]}


def test_a_row_of_exactly_max_length_is_kept(make_run, write_rows):
    record = prepare_data(make_run(write_rows(ROWS[0]), {"max_length": 17}))
    assert record.packing_efficiency == 1.0


def test_too_long_rows_are_an_error_where_the_recipe_says_so(make_run, write_rows):
    with pytest.raises(DataError, match=r"rows.jsonl line 30: has 47 tokens, data.max_length is 32; .* data.too_long"):
        prepare_data(make_run(write_rows(*ROWS), {"max_length": 32, "too_long": "error"}))


def test_no_row_left_is_an_error_and_leaves_no_record(make_run, write_rows):
    run = make_run(write_rows(*ROWS), {"max_length": 8})
    with pytest.raises(DataError, match=r"each of its 30 rows has more than data.max_length = 8 tokens \(the longest 47\)"):
        prepare_data(run)
    assert not run.data.exists() and not run.record_file("data").exists()


def test_rows_that_are_made_need_no_file(make_run):
    record = prepare_data(make_run({"task": "verilog", "rows": 20}, {"max_length": 512}))
    assert record.rows == 20


def test_fewer_rows_than_a_step_are_said(make_run, write_rows, capsys):
    prepare_data(make_run(write_rows(ROWS[0]), train={"rows_per_step": 4}))
    out = capsys.readouterr()
    assert "too few for one step of train.rows_per_step = 4, so training will ask to lower that" in out.err
    assert out.out == ""


def test_a_row_longer_than_the_model_reads_is_refused(make_run, write_rows):
    with pytest.raises(RecipeError, match=r"data.max_length: 4096 was given, but tiny-31b reads at most 2048 tokens"):
        prepare_data(make_run(write_rows(*ROWS), {"max_length": 4096}))


def test_the_recipes_template_is_used_and_its_hash_recorded(make_run, write_rows, checkpoint, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text((checkpoint / "chat_template.jinja").read_text().replace("<|turn>model", "<|turn>assistant"))
    own.write_text(own.read_text().replace("'model' if", "'assistant' if"))
    plain = prepare_data(make_run(write_rows(*ROWS), name="plain"))
    changed = prepare_data(make_run(write_rows(*ROWS), {"template": str(own)}, name="changed"))
    assert plain.template_sha256 != changed.template_sha256 and plain.rows_sha256 != changed.rows_sha256


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
    assert read_record(run, "data") == before
    assert sorted(file.name for file in run.data.iterdir()) == ["loss_mask.npy", "positions.npy", "segments.npy", "tokens.npy"]


def test_the_record_says_what_it_was_made_from(run):
    record = prepare_data(run)
    assert {"recipe", "data.train", "checkpoint", "tokenizer.json", "chat template"} == set(record.origin.made_from)
