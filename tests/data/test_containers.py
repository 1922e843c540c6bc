"""Files of rows beside JSONL and parquet: JSON, CSV and TSV, packed or not, and what of them is refused."""

import csv
import gzip
import json
from io import StringIO

import pyarrow
import pytest

from gemsmith.data import reader
from gemsmith.data.dataset import read_dataset
from gemsmith.errors import DataError
from gemsmith.tasks.messages import text_message, text_of

ROWS = [{"prompt": "add", "response": "wire"}, {"prompt": 'a, "b"\nc', "response": "ä" * 200_000}]


def refused(source: object) -> str:
    with pytest.raises(DataError) as error:
        read_dataset(str(source))
    assert "\n" not in str(error.value)
    return str(error.value)


def texts(documents) -> list[list[str]]:
    return [[text_of(message) for message in document.messages] for document in documents]


def written(name: str) -> bytes:
    """ROWS in the container that the name says."""
    kind = name.split(".")[1]
    if kind in ("csv", "tsv"):
        file = StringIO()
        writer = csv.DictWriter(file, ["prompt", "response"], delimiter="," if kind == "csv" else "\t")
        writer.writeheader()
        writer.writerows(ROWS)
        return file.getvalue().encode()
    return (json.dumps(ROWS, indent=1) if kind == "json" else "\n".join(map(json.dumps, ROWS))).encode()


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "csv", "tsv"])
def test_the_same_rows_are_in_every_container(kind, packing, tmp_path):
    file, content = tmp_path / f"rows.{kind}{packing}", written(f"rows.{kind}")
    if packing == ".gz":
        content = gzip.compress(content[:100]) + gzip.compress(content[100:])  # of two members, as some tools write
    if packing == ".zst":
        content = pyarrow.compress(content, "zstd", asbytes=True)
    file.write_bytes(content)
    documents = read_dataset(str(file)).documents
    assert texts(documents) == [[*row.values()] for row in ROWS]
    numbers = {"jsonl": "line 2", "ndjson": "line 2", "json": "row 2", "csv": "line 3", "tsv": "line 3"}
    assert documents[1].origin == f"{file.name} {numbers[kind]}"
    assert texts(read_dataset(str(tmp_path)).documents) == texts(documents)


def test_a_json_file_of_lines_is_read_as_lines(tmp_path):
    (tmp_path / "rows.json").write_text("\ufeff" + "\n".join(map(json.dumps, ROWS)))
    assert [row.origin for row in read_dataset(str(tmp_path / "rows.json")).documents] == [
        "rows.json line 1",
        "rows.json line 2",
    ]


def test_a_json_file_with_a_byte_order_mark_and_space_before_its_array_is_read(tmp_path):
    (tmp_path / "rows.json").write_text("\ufeff\n " + json.dumps(ROWS))
    assert len(read_dataset(str(tmp_path / "rows.json")).documents) == 2


def test_csv_between_semicolons_is_read_and_quoted_ones_are_text(tmp_path):
    (tmp_path / "rows.csv").write_text('prompt;response\n"add; then, stop";wire\n')
    assert texts(read_dataset(str(tmp_path / "rows.csv")).documents) == [["add; then, stop", "wire"]]


def test_columns_of_csv_that_no_form_has_are_counted(tmp_path):
    (tmp_path / "rows.csv").write_text("\ufeff,prompt,response,id\r\n0,add,wire,7\r\n\r\n1,add,wire,8\r\n")
    found = read_dataset(str(tmp_path / "rows.csv"))
    assert [document.messages for document in found.documents] == [
        (text_message("user", "add"), text_message("assistant", "wire"))
    ] * 2
    assert found.ignored_columns == {"''": 2, "id": 2}
    assert found.documents[1].origin == "rows.csv line 4"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", '[{"prompt": "a"},\n {"prompt" "b"}]', "rows.json line 2, column 12: is not JSON ("),
        (
            "rows.json",
            '[{"prompt": "a", "prompt": "b"}]',
            "rows.json: is not JSON (prompt is given twice; keep one); it",
        ),
        ("rows.json", "[1]", "rows.json row 1: is a number; must be an object"),
        ("rows.json", '{\n"data": []}', "rows.json line 1, column 2: is not JSON ("),
        ("rows.json", "[]", "rows.json: holds no rows"),
        (
            "rows.csv",
            "add,wire\nsub,gate\n",
            "rows.csv line 2: has the columns add, wire; allowed: messages, or prompt",
        ),
        ("rows.csv", "prompt,response\na,b\nadd\n", "rows.csv line 3: has 1 values, the first line names 2 columns"),
        ("rows.csv", 'prompt,response\n"a"b,c\n', "rows.csv line 2: is not CSV ("),
        ("rows.csv", 'prompt,response\n"a,c\nd', "rows.csv line 3: is not CSV ("),
        ("rows.csv", "prompt,prompt\na,b\n", "rows.csv line 1: has the column 'prompt' twice; keep one"),
        ("rows.csv", "", "rows.csv: holds no rows"),
        ("rows.csv", "prompt,response\n,b\n", "rows.csv line 2: prompt is an empty prompt"),
        ("rows.csv", b"prompt,response\na,b\nc,\xe9\n", "rows.csv line 3, byte 3: is not UTF-8; convert"),
        ("rows.json", b'[{"prompt": "\xe9"}]', "rows.json, byte 14: is not UTF-8; convert"),
        ("rows.jsonl.gz", b"{}", "rows.jsonl.gz: cannot be read ("),
        ("rows.csv.zst", b"{}", "rows.csv.zst: cannot be read ("),
        ("rows.jsonl.gz", gzip.compress(b'{"prompt": "a", "response": "b"}' * 9, mtime=0)[:-20], "cannot be read ("),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused_with_the_place(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused(tmp_path / name)


@pytest.mark.parametrize("line_feeds", [True, False])
def test_a_small_packed_file_of_endless_text_is_refused_before_it_is_all_read(line_feeds, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_MOST_UNPACKED_BYTES", 2**20)
    row = b'{"prompt": "a", "response": "b"}' + (b"\n" if line_feeds else b" ")
    (tmp_path / "rows.jsonl.zst").write_bytes(pyarrow.compress(row * 100_000, "zstd", asbytes=True))
    text = refused(tmp_path / "rows.jsonl.zst")
    assert "allowed are 500 times as many; write its rows as JSONL" in text


def test_a_folder_of_one_kind_twice_is_refused(tmp_path):
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        (tmp_path / name).write_text("")
    assert "mixes rows.jsonl, rows.jsonl.gz; name one file" in refused(tmp_path)


def test_a_json_file_beside_rows_is_about_them(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert len(read_dataset(str(tmp_path)).documents) == 1


def test_reading_csv_leaves_the_limit_of_other_readers_alone(tmp_path):
    limit = csv.field_size_limit()
    (tmp_path / "rows.csv").write_bytes(written("rows.csv"))
    assert len(read_dataset(str(tmp_path / "rows.csv")).documents) == 2
    assert csv.field_size_limit() == limit
