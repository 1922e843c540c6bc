"""Files of rows: what of each kind is read, and what is refused by file and line."""

import json
import os
import re
import struct

import pyarrow
import pyarrow.parquet
import pytest

from gemsmith.data import reader as stored
from gemsmith.data.dataset import read_dataset
from gemsmith.data.reader import find_files
from gemsmith.errors import DataError
from gemsmith.tasks.messages import text_message, text_of

PAIR = {"prompt": "add", "response": "wire"}
CHAT = {"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "wire"}]}
AS_MESSAGES = (text_message("user", "add"), text_message("assistant", "wire"))


def refused(source: object) -> str:
    with pytest.raises(DataError) as error:
        read_dataset(str(source))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_blank_lines_are_no_rows_and_keep_their_numbers(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"\n{json.dumps(PAIR)}\n\n{json.dumps(PAIR)}")
    assert [document.origin for document in read_dataset(str(file)).documents] == [
        "rows.jsonl line 2",
        "rows.jsonl line 4",
    ]


def test_a_byte_order_mark_at_the_start_is_no_error(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(PAIR).encode())
    assert read_dataset(str(file)).documents[0].messages == AS_MESSAGES


def test_a_folder_is_read_file_by_file_in_the_order_of_names(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(PAIR | {"prompt": name}))
    assert [text_of(document.messages[0]) for document in read_dataset(str(tmp_path)).documents] == ["a", "b"]


def test_a_dataset_saved_by_hugging_face_datasets_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([CHAT] * 5).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    documents = read_dataset(str(tmp_path / "saved")).documents
    assert [document.messages for document in documents] == [AS_MESSAGES] * 5
    assert documents[3].origin == "data-00001-of-00002.arrow row 1"


def test_a_missing_file_is_refused(tmp_path):
    assert "nothing.jsonl: does not exist; name a JSONL" in refused(tmp_path / "nothing.jsonl")


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    for name in ("rows.xlsx", "rows.txt.gz", "rows.parquet.gz"):
        (tmp_path / name).write_text("prompt,response")
        assert "file; allowed: .jsonl, .json, .csv, .tsv (each as .gz or .zst, too), .parquet, or" in refused(
            tmp_path / name
        )


def test_broken_json_is_refused_with_its_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR) + '\n{"prompt": "a",\n')
    assert "rows.jsonl line 2, column 16: is not JSON" in refused(tmp_path / "rows.jsonl")


def test_a_number_of_too_many_digits_is_refused_with_its_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR) + '\n{"prompt": ' + "1" * 5000 + "}")
    assert "rows.jsonl line 2: is not JSON" in refused(tmp_path / "rows.jsonl")


def test_text_that_is_not_utf8_is_refused_with_line_and_byte(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(json.dumps(PAIR).encode() + b'\n{"prompt": "\xe9"}')
    assert "rows.jsonl line 2, byte 13: is not UTF-8" in refused(tmp_path / "rows.jsonl")


def test_a_damaged_parquet_file_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 but not really PAR1")
    assert "rows.parquet: cannot be read as parquet" in refused(tmp_path / "rows.parquet")
    # Values that Python has none for.
    kinds = {pyarrow.duration("s"): 2**62, pyarrow.date64(): 2**61, pyarrow.timestamp("s", tz="Nowhere/City"): 0}
    for kind, value in kinds.items():
        table = pyarrow.table({"prompt": pyarrow.array([value], kind), "response": ["a"]})
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        assert "rows.parquet: cannot be read as parquet (" in refused(tmp_path / "rows.parquet")


def test_a_folder_without_data_is_refused_and_the_folder_inside_is_named(tmp_path):
    (tmp_path / "data").mkdir()
    assert f"did you mean {tmp_path / 'data'}?" in refused(tmp_path)


def test_a_folder_that_mixes_splits_is_refused(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}-00000-of-00001.jsonl").write_text(json.dumps(PAIR))
    assert "mixes test-00000-of-00001.jsonl, train-00000-of-00001.jsonl" in refused(tmp_path)


def test_a_saved_dataset_of_several_splits_is_refused_and_one_is_named(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert f"name one of them, such as {tmp_path / 'train'}" in refused(tmp_path)


def test_a_saved_dataset_with_a_missing_shard_is_refused(tmp_path):
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    assert "data-00000-of-00001.arrow is missing" in refused(tmp_path)
    for names, more in (
        (["../a.arrow"], {}),
        (["a.arrow", "a.arrow"], {}),
        (["a.arrow"], {"_indices_data_files": [1]}),
    ):
        state = {"_data_files": [{"filename": name} for name in names], **more}
        (tmp_path / "state.json").write_text(json.dumps(state))
        assert "state.json: names a file twice or in another folder, or indices that pick rows" in refused(tmp_path)
    with pytest.raises(DataError):
        find_files(str(tmp_path))


def test_a_name_that_stands_twice_among_very_many_is_found_without_comparing_all(tmp_path):
    names = [*map("c{}".format, range(200_000)), "c199999"]
    (tmp_path / "rows.csv").write_text(",".join(names) + "\n")
    (tmp_path / "rows.jsonl").write_text("{" + ",".join(f'"{name}":1' for name in names) + "}")
    assert "rows.csv line 1: has the column 'c199999' twice" in refused(tmp_path / "rows.csv")
    assert "c199999 is given twice" in refused(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("entries", [7, [None], [{}], [["a.arrow"]]])
def test_a_saved_dataset_that_names_no_files_is_refused(tmp_path, entries):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": entries}))
    assert "state.json: names no files; save the dataset again" in refused(tmp_path)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": {"a": entries}}))
    assert refused(tmp_path).endswith(f"such as {tmp_path / 'train'}")


def test_an_arrow_file_whose_offsets_lie_outside_it_is_refused_before_they_are_followed(tmp_path):
    table = pyarrow.Table.from_pylist([PAIR] * 3)
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    file, offsets = tmp_path / "a.arrow", struct.Struct("<4i")
    whole = file.read_bytes()
    assert whole.count(offsets.pack(0, 3, 6, 9)) == 1
    file.write_bytes(whole.replace(offsets.pack(0, 3, 6, 9), offsets.pack(0, 2**30, 2**30 + 3, 9)))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    assert "cannot be read as an arrow stream (" in refused(tmp_path)


def test_what_arrow_says_in_several_lines_is_refused_in_one(tmp_path):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([PAIR]), file)
    data = bytearray(file.read_bytes())
    data[4:12] = b"\xff" * 8
    file.write_bytes(data)
    assert "rows.parquet: cannot be read (" in refused(file)


def test_a_key_that_a_row_gives_twice_is_refused_with_its_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR) + '\n{"prompt": "a", "prompt": "b", "response": "c"}')
    assert "rows.jsonl line 2: is not JSON (prompt is given twice; keep one)" in refused(tmp_path / "rows.jsonl")


def test_a_column_that_a_table_has_twice_is_refused(tmp_path):
    table = pyarrow.table([["a"], ["b"], ["c"]], names=["prompt", "prompt", "response"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert "has the column prompt twice" in refused(tmp_path / "rows.parquet")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_pipe_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    assert "cannot be read (is not a regular file)" in refused(tmp_path / name)
    assert "cannot be read (is not a regular file)" in refused(tmp_path)


@pytest.mark.parametrize("dictionary", [True, False])
def test_a_small_table_of_much_text_is_refused_before_it_is_all_read(dictionary, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "_MOST_UNPACKED_BYTES", 2**20)
    rows = pyarrow.table({"prompt": ["add two " * 10_000] * 2000, "response": ["wire"] * 2000})
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(rows, file, use_dictionary=dictionary, compression="zstd")
    assert file.stat().st_size < 2**18
    assert re.search(r"unpacks its [\d,]+ bytes to [\d,]+ or more; allowed are 500 times as many", refused(file))


@pytest.mark.parametrize("many", ["texts", "texts in a list", "rows"])
def test_a_table_that_names_one_text_often_or_has_endless_rows_is_refused(many, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "_MOST_UNPACKED_BYTES", 2**20)
    count = 20_000 if many == "rows" else 2000
    indices = pyarrow.array([0] * count, pyarrow.int32())
    texts = pyarrow.DictionaryArray.from_arrays(indices, ["x" if many == "rows" else "add two " * 10_000])
    if many == "texts in a list":
        texts = pyarrow.ListArray.from_arrays(list(range(count + 1)), texts)
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts, "response": ["wire"] * count}), file)
    assert re.search(r"unpacks its [\d,]+ bytes to [\d,]+ or more; allowed are 500 times as many", refused(file))
