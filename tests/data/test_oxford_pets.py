import json
from io import BytesIO

import pytest
from PIL import Image

from gemsmith.data.dataset import Dataset, read_dataset
from gemsmith.data.images import validate_images
from gemsmith.data.prepare.oxford_pets import SPLITS, prepare_oxford_pets
from gemsmith.errors import DataError
from gemsmith.images.patches import PatchConfig
from gemsmith.tasks.messages import images_of, text_of

LISTS = {
    "trainval": "Abyssinian_1 1 1 1\nAbyssinian_34 1 1 1\namerican_bulldog_2 2 2 1\nSiamese_9 33 1 11\n",
    "test": "Abyssinian_5 1 1 1\n\nsaint_bernard_10 29 2 20\n",
}


def save(mode, kind):
    stream = BytesIO()
    Image.new(mode, (30, 20), 99 if mode == "L" else None).save(stream, kind)
    return stream.getvalue()


@pytest.fixture
def pets(tmp_path):
    """The data set's folders with images as some of it are: grey, CMYK, PNG and GIF by another name, cut off."""
    folder = tmp_path / "pets"
    for name in ("images", "annotations"):
        (folder / name).mkdir(parents=True)
    for split, lines in LISTS.items():
        (folder / "annotations" / f"{split}.txt").write_text(lines)
    images = {
        "Abyssinian_1": save("L", "JPEG"),
        "Abyssinian_34": save("RGB", "PNG"),
        "american_bulldog_2": save("CMYK", "JPEG"),
        "Siamese_9": save("RGB", "JPEG")[:300],
        "Abyssinian_5": save("P", "GIF"),
        "saint_bernard_10": save("RGB", "JPEG"),
    }
    for name, data in images.items():
        (folder / "images" / f"{name}.jpg").write_bytes(data)
    (folder / "images" / "Abyssinian_100.mat").write_bytes(b"MATLAB 5.0 MAT-file")
    return folder


def test_each_image_of_a_split_is_a_row_with_all_breeds_in_its_prompt(pets):
    for split in SPLITS:
        record = prepare_oxford_pets(pets, pets / f"{split}.jsonl", split=split)
    rows = [json.loads(line) for line in (pets / "test.jsonl").read_text().splitlines()]
    assert [(row["image"], row["response"]) for row in rows] == [
        ("images/Abyssinian_5.jpg", "abyssinian"),
        ("images/saint_bernard_10.jpg", "saint_bernard"),
    ]
    breeds = "abyssinian, american_bulldog, saint_bernard, siamese"
    assert all(row["labels"] == breeds.split(", ") for row in rows)
    assert all(
        f"{breeds}. Answer with its name and nothing else; if none fits, answer Unknown." in row["prompt"]
        for row in rows
    )
    assert (record.rows_read, record.rows_written) == (2, 2)
    train = (pets / "trainval.jsonl").read_text()
    assert train.count(breeds) == 4 and "labels" not in train


def test_rows_elsewhere_find_the_images(pets, tmp_path):
    out = tmp_path / "rows" / "train.jsonl"
    out.parent.mkdir()
    prepare_oxford_pets(pets, out, split="trainval")
    documents = read_dataset(str(out)).documents
    seen = validate_images(Dataset(documents=documents), PatchConfig(budget=70), bad="drop", key="data.train")
    assert [text_of(document.messages[-1]) for document in seen.documents] == [
        "abyssinian",
        "abyssinian",
        "american_bulldog",
    ]
    assert seen.dropped == {"image damaged": 1}
    with pytest.raises(DataError, match=r"Siamese_9\.jpg cannot be decoded"):
        validate_images(Dataset(documents=documents), PatchConfig(budget=70), bad="error", key="data.train")
    assert [len(images_of(document.messages)) for document in documents] == [1] * 4


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("test.txt", None, "test.txt: does not exist; give the folder that"),
        ("test.txt", "# comment\n", "test.txt: names no image"),
        ("trainval.txt", "Abyssinian 1 1 1\n", "trainval.txt line 1: is 'Abyssinian 1 1 1'; must be NAME CLASS"),
        ("trainval.txt", "../../Abyssinian_1 1 1 1\n", "trainval.txt line 1: is '../../Abyssinian_1"),
        ("trainval.txt", "Abyssinian_1 1 1\n", "trainval.txt line 1: is"),
        ("trainval.txt", "Bengal_1 1 1 1\n", "class 1 is that of Bengal_1 and of Abyssinian_5"),
        ("trainval.txt", "Abyssinian_7 1 1 1\nAbyssinian_1 1 1 1\n", "1 of 2 images do not exist (Abyssinian_7"),
    ],
    ids=["gone", "empty", "no number", "path", "short", "two breeds", "no image"],
)
def test_lists_that_cannot_be_used_are_one_line(pets, name, text, expected):
    file = pets / "annotations" / name
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(DataError) as caught:
        prepare_oxford_pets(pets, pets / "rows.jsonl", split="trainval")
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not (pets / "rows.jsonl").exists()
