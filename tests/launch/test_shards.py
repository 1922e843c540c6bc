import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from gemsmith.errors import DataError, RunError
from gemsmith.launch import shards as images
from gemsmith.launch.shards import LIST, find_images, pack, unpack
from gemsmith.recipe.schema import Data


@pytest.fixture
def pets(tmp_path):
    """Returns the images that rows name, beside three that are there: `pets({"image": "images/a.jpg"})`."""
    folder = tmp_path / "pets"
    for name in "abc":
        (folder / "images").mkdir(parents=True, exist_ok=True)
        (folder / "images" / f"{name}.jpg").write_bytes(name.encode() * 10)

    def find(*rows, place="rows.jsonl"):
        file = folder / place
        file.parent.mkdir(exist_ok=True)
        asked = {"prompt": "Which?", "response": "pug"}
        file.write_text("".join(json.dumps(row if "messages" in row else asked | row) + "\n" for row in rows))
        return find_images(Data(train="x"), "data.train", file if file.parent == folder else file.parent)

    return find


def message(part):
    asked = {"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}
    return {"messages": [asked, {"role": "assistant", "content": "pug"}]}


@pytest.mark.parametrize(
    "row",
    [
        {"image": "images/a.jpg"},
        {"images": ["./images/a.jpg", "images/a.jpg"]},
        {"image": {"path": "images/a.jpg"}},
        message({"type": "image", "path": "images/a.jpg"}),
    ],
)
def test_every_form_of_a_path_is_found_once_with_its_bytes(pets, row):
    found = pets(row, row)
    assert [*found.sums] == ["images/a.jpg"] and found.total_bytes == 10


def test_rows_that_name_no_image_bring_none(pets):
    assert pets({}) is None and pets({"prompt": "image"}) is None
    assert pets({"image": {"bytes": "YQ=="}}) is None


def test_rows_of_a_pipe_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        find_images(Data(train="x"), "data.train", tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("/etc/passwd", "rows.jsonl line 2: names the image /etc/passwd; a launch carries those below the folder of"),
        ("../a.jpg", "rows.jsonl line 2: names the image ../a.jpg; a launch carries"),
        ("file:///etc/passwd", "rows.jsonl line 2: names the image /etc/passwd; a launch carries"),
        ("images/a\nb.jpg", r"names the image 'images/a\nb.jpg', which no list can name; rename it"),
        ("images/gone.jpg", "/pets/images/gone.jpg does not exist; put it there, or take the row out"),
        ("images", "/pets/images does not exist"),
        ("https://a/b.jpg", "only file:// and data: URLs are read"),
    ],
)
@pytest.mark.parametrize("place", ["rows.jsonl", "rows/rows.jsonl"])
def test_a_image_that_cannot_be_carried_is_one_line(pets, name, line, place):
    if place != "rows.jsonl":
        line = line.replace("/pets/images", "/pets/rows/images")
    with pytest.raises(DataError, match=re.escape(line)) as raised:
        pets({}, {"image": name}, place=place)
    assert "\n" not in str(raised.value)


def test_a_folder_of_rows_goes_with_the_images_in_it(pets, tmp_path):
    (tmp_path / "pets" / "rows").mkdir()
    shutil.copytree(tmp_path / "pets" / "images", tmp_path / "pets" / "rows" / "images")
    assert pets({"image": "images/a.jpg"}, place="rows/rows.jsonl") is None


@pytest.fixture
def packed(pets, tmp_path, monkeypatch):
    """Three images in two files."""
    monkeypatch.setattr(images, "SHARD_BYTES", 15)
    found = pets(*({"image": f"images/{name}.jpg"} for name in "cab"))
    (tmp_path / "list").write_text(found.list_text)
    pack(tmp_path / "list", found.folder, tmp_path / "out" / found.place)
    return tmp_path / "out" / found.place


def test_what_is_unpacked_is_what_was_packed(packed, tmp_path):
    assert sorted(path.name for path in packed.iterdir()) == ["00000.tar", "00001.tar", LIST]
    assert unpack(packed, tmp_path / "there") == 3
    for name in "abc":
        assert (tmp_path / "there" / "images" / f"{name}.jpg").read_bytes() == name.encode() * 10
    assert [path.name for path in packed.iterdir()] == [LIST]


def test_the_same_images_are_packed_to_the_same_bytes(packed, tmp_path):
    """An upload that was cut short sends again only what is missing."""
    os.utime(tmp_path / "pets" / "images" / "a.jpg", (1, 1))
    pack(tmp_path / "list", tmp_path / "pets", tmp_path / "again")
    for file in packed.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_a_image_that_changed_since_is_not_packed(packed, tmp_path):
    (tmp_path / "pets" / "images" / "b.jpg").write_bytes(b"another")
    with pytest.raises(DataError, match=r"images/b\.jpg: has changed since the launch was rendered; render it again"):
        pack(tmp_path / "list", tmp_path / "pets", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def put_outside(packed: Path) -> None:
    with tarfile.open(packed / "00000.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../outside"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: (packed / "00000.tar").unlink(),
        lambda packed: (packed / "00001.tar").write_bytes(b"no tar"),
        lambda packed: (packed / LIST).write_text(f"{'0' * 64}  images/a.jpg\n"),
        put_outside,
    ],
)
def test_what_is_not_what_was_packed_is_told(packed, tmp_path, damage):
    damage(packed)
    with pytest.raises(RunError, match=r"data-train: .*is not what was packed"):
        unpack(packed, tmp_path / "there")
    assert not (tmp_path / "outside").exists()
