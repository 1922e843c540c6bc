import base64
import json
from pathlib import Path

import pytest

from gemsmith.data.dataset import Document, read_dataset, read_held_out
from gemsmith.data.parts import ImageSource, read_image
from gemsmith.errors import DataError
from gemsmith.recipe.load import build_recipe
from gemsmith.tasks.messages import ImagePart, TextPart, images_of

ANSWER = {"role": "assistant", "content": "a cat"}
BYTES = b"\x89PNG"


def user(*parts: object) -> dict:
    return {"messages": [{"role": "user", "content": [*parts]}, ANSWER]}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def question_parts(document: Document) -> tuple:
    return document.messages[0].parts


def test_images_stand_where_their_parts_stand(write_rows, tmp_path):
    row = user({"type": "image", "path": "a.png"}, text("or"), {"type": "image", "url": "file:///b/c%20d.png"})
    [document] = read_dataset(str(write_rows(row))).documents
    a, b = ImagePart(path=str(tmp_path / "a.png")), ImagePart(path="/b/c d.png")
    assert question_parts(document) == (a, TextPart(text="or"), b)


def test_relative_paths_count_from_the_folder_of_the_rows(write_rows, tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    file = write_rows(user({"type": "image", "path": "x/a.png"}), name="deep/rows.jsonl")
    monkeypatch.chdir(tmp_path)
    for source in ("deep/rows.jsonl", "deep", str(file)):
        [document] = read_dataset(source).documents
        assert question_parts(document) == (ImagePart(path=str(tmp_path / "deep" / "x" / "a.png")),)


def test_a_path_may_begin_with_the_sign_of_a_home(write_rows, tmp_path):
    [document] = read_dataset(
        str(write_rows({"prompt": "a", "response": "b", "images": ["~$a.png", "~/b.png"]}))
    ).documents
    assert [part.path for part in images_of(document.messages)] == [
        str(tmp_path / "~$a.png"),
        str(Path.home() / "b.png"),
    ]


@pytest.mark.parametrize("column", [{"image": "a.png"}, {"images": ["a.png"]}])
def test_the_images_of_a_prompt_come_before_its_text(column, write_rows, tmp_path):
    [document] = read_dataset(str(write_rows({"prompt": "what?", "response": "a"} | column))).documents
    assert question_parts(document) == (ImagePart(path=str(tmp_path / "a.png")), TextPart(text="what?"))


def test_bare_parts_take_the_columns_images_in_order(write_rows):
    row = user({"type": "image"}, text("and"), {"type": "image", "text": None}) | {"images": ["/a", "/b"]}
    [document] = read_dataset(str(write_rows(row))).documents
    assert question_parts(document) == (ImagePart(path="/a"), TextPart(text="and"), ImagePart(path="/b"))


IN_TEXT = {"prompt": "<image>\nand <image>?", "response": "a"}


def test_placeholders_in_a_text_take_the_columns_images_in_order_and_are_text_where_there_are_none(write_rows):
    [document] = read_dataset(str(write_rows(IN_TEXT | {"images": ["/a", "/b"]}))).documents
    images = ImagePart(path="/a"), ImagePart(path="/b")
    assert question_parts(document) == (images[0], TextPart(text="\nand "), images[1], TextPart(text="?"))
    said = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "a"}]
    [document] = read_dataset(str(write_rows({"conversations": said, "image": "/a"}))).documents
    assert question_parts(document) == (images[0], TextPart(text="\nWhat?"))
    [document] = read_dataset(str(write_rows(IN_TEXT))).documents
    assert question_parts(document) == (TextPart(text=IN_TEXT["prompt"]),)


def test_openais_image_parts_are_read(write_rows):
    url = {"url": f"data:image/png;base64,{base64.b64encode(BYTES).decode()}", "detail": "low"}
    [document] = read_dataset(str(write_rows(user({"type": "image_url", "image_url": url}, text("what?"))))).documents
    assert question_parts(document) == (ImagePart(data=BYTES), TextPart(text="what?"))


@pytest.mark.parametrize(
    "value",
    [
        BYTES,
        {"bytes": BYTES, "path": "other.png"},
        {"bytes": base64.b64encode(BYTES).decode()},
        {"path": None, "bytes": BYTES},
    ],
)
def test_bytes_are_kept_in_a_file_where_there_is_room_for_it(value):
    assert read_image(value, "row 1", ImageSource()) == ImagePart(data=BYTES)
    kept: list[bytes] = []
    source = ImageSource(keep=lambda data: kept.append(data) or "/kept")
    assert read_image(value, "row 1", source) == ImagePart(path="/kept") and kept == [BYTES]


def test_a_datasets_image_column_and_parquet_with_bytes_are_read(tmp_path):
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = {"prompt": ["what?"], "response": ["a"]}
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "response": datasets.Value("string"), "image": datasets.Image()}
    )
    saved = datasets.Dataset.from_dict(rows | {"image": [{"bytes": BYTES, "path": None}]}, features=features)
    saved.save_to_disk(str(tmp_path / "saved"))
    pyarrow.parquet.write_table(pyarrow.table(rows | {"images": [[BYTES, BYTES]]}), tmp_path / "rows.parquet")
    [one], [two] = (
        read_dataset(str(tmp_path / "saved")).documents,
        read_dataset(str(tmp_path / "rows.parquet")).documents,
    )
    assert question_parts(one) == (ImagePart(data=BYTES), TextPart(text="what?"))
    assert question_parts(two) == (ImagePart(data=BYTES),) * 2 + (TextPart(text="what?"),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            user({"type": "image", "url": "https://a.org/b.png"}),
            "an image at 'https://a.org/b.png'; only file:// and",
        ),
        (user({"type": "image", "path": "s3://a/b.png"}), "an image at 's3://a/b.png'; only file:// and"),
        (user({"type": "image", "path": "a\udcff.png"}), "png', a name that is not in UTF-8"),
        (user({"type": "image", "url": "data:text/plain;base64,AA=="}), "only file:// and data: URLs are read"),
        (user({"type": "image", "url": "data:image/png;base64,A"}), "whose bytes are not base64"),
        (IN_TEXT | {"images": ["/a", "/b", "/c"]}, "1 of the 3 images in its column have no place"),
        (IN_TEXT | {"images": ["/a"]}, "has more images than the row's column images"),
        (user({"type": "image", "path": "a", "url": "file:///b"}), "an image with path and url; keep one of them"),
        (user({"type": "image", "path": ["a"]}), "has an image that is a list; give a path"),
        (user({"type": "image", "bytes": "a kitten"}), "whose bytes are not base64"),
        (user({"type": "image"}), "has more images than the row's column images"),
        (user({"type": "image"}) | {"images": ["a", "b"]}, "1 of the 2 images in its column have no place"),
        (user(text("a")) | {"image": "a"}, "1 of the 1 images in its column have no place"),
        (user({"type": "video", "path": "a"}), 'has a part that is video; a part must be {"type": "text"'),
        ({"prompt": "a", "response": "b", "image": "a", "images": ["b"]}, "has image and images; keep one of them"),
        (
            {"messages": [{"role": "user", "content": "a"}, ANSWER | {"content": [{"type": "image", "path": "a"}]}]},
            "messages[1] is an empty answer",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": [{"type": "image", "path": "a"}]},
                    *user(text("a"))["messages"],
                ]
            },
            "messages[0] is of the role system and has an image; only user turns may",
        ),
    ],
)
def test_a_image_that_cannot_be_read_from_its_row_is_refused_with_the_line(row, message, write_rows):
    with pytest.raises(DataError) as error:
        read_dataset(str(write_rows(row)))
    assert str(error.value).startswith("rows.jsonl line 1: ") and message in str(error.value)


def test_held_out_rows_have_their_images(write_rows):
    file = write_rows(user({"type": "image", "path": "/a"}))
    recipe = build_recipe({"checkpoint": "x", "data": {"train": "x", "eval": str(file)}})
    (document,) = read_held_out(recipe).documents
    assert images_of(document.messages) == (ImagePart(path="/a"),)


def test_the_rows_of_a_table_are_the_same_in_json(tmp_path):
    import pyarrow
    import pyarrow.parquet

    values = user({"type": "image", "path": "/a", "text": None}, {"type": "text", "text": "b", "path": None})
    values["messages"][1] = ANSWER | {"content": [{"type": "text", "text": "a cat", "path": None}]}
    table = pyarrow.Table.from_pylist([values])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(values))
    one, two = (read_dataset(str(Path(tmp_path / name))).documents for name in ("rows.parquet", "rows.jsonl"))
    assert question_parts(one[0]) == question_parts(two[0]) == (ImagePart(path="/a"), TextPart(text="b"))
