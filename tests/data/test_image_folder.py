import os

import pytest

from gemsmith.data.dataset import find_source_files, read_dataset, source_sha256
from gemsmith.data.image_folder import folder_notices, folder_rows
from gemsmith.errors import DataError, RecipeError
from gemsmith.recipe.load import build_recipe, dump_recipe
from gemsmith.recipe.schema import Data
from gemsmith.tasks.messages import ImagePart, TextPart, text_of


@pytest.fixture
def pets(tmp_path):
    folder = tmp_path / "pets"
    for name, count in (("great_dane", 10), ("sphynx", 4)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.JPG").write_bytes(f"{name} {number}".encode())
    return folder


def read(folder, **options):
    part = options.pop("part", "train")
    data = Data(train=str(folder), eval=str(folder), format="image-folder", prompt="Which of {labels}?", **options)
    return read_dataset(str(folder), data=data, part=part)


def test_each_photo_is_a_row_its_class_the_answer(pets):
    documents = read(pets).documents
    assert [document.origin for document in documents[:2]] == ["great_dane/0.JPG", "great_dane/1.JPG"]
    prompt, answer = documents[-1].messages
    assert prompt.parts == (
        ImagePart(path=str(pets / "sphynx" / "3.JPG")),
        TextPart(text="Which of great dane, sphynx?"),
    )
    assert text_of(answer) == "sphynx" and len(documents) == 14


def test_labels_may_be_given(pets):
    documents = read(pets, labels={"great_dane": "Great Dane", "sphynx": "Sphynx (cat)"}).documents
    assert {text_of(document.messages[1]) for document in documents} == {"Great Dane", "Sphynx (cat)"}
    assert text_of(documents[0].messages[0]) == "Which of Great Dane, Sphynx (cat)?"


def test_the_held_out_share_of_each_class_is_the_same_each_time_and_stated(pets):
    train, held_out = (read(pets, held_out=0.2, part=part) for part in ("train", "held-out"))
    names = [{document.origin for document in dataset.documents} for dataset in (train, held_out)]
    assert names[0] | names[1] == {document.origin for document in read(pets).documents}
    assert not names[0] & names[1] and names[1] == {"great_dane/0.JPG", "great_dane/4.JPG", "sphynx/0.JPG"}
    assert train.warnings == (
        "data.held_out: of 14 images in 2 classes 3 are not trained on but held out, by a hash of their names",
    )


def test_a_class_of_one_is_trained_on(pets):
    (pets / "lone").mkdir()
    (pets / "lone" / "a.png").write_bytes(b"a")
    rows = folder_rows(str(pets), Data(train="-", prompt="a", held_out=0.9), held_out=False)
    assert sum(origin.startswith("lone/") for origin, _ in rows) == 1


def test_files_that_are_no_images_are_counted_by_name(pets):
    for name in ("readme.txt", "sphynx/list.csv", ".DS_Store", "sphynx/.hidden.jpg"):
        (pets / name).write_text("a")
    [notice] = folder_notices(str(pets), Data(train="-", prompt="a"))
    assert "are ignored: 2 (readme.txt, sphynx/list.csv)" in notice
    assert len(list(folder_rows(str(pets), Data(train="-", prompt="a"), held_out=False))) == 14


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda pets: (pets / "empty").mkdir(), "empty: holds no image"),
        (lambda pets: (pets / "sphynx" / "more").mkdir(), "more: is a folder in a class's folder"),
        (lambda pets: pets.rename(pets.with_name("gone")), "is not a folder"),
        (lambda pets: (pets / "sphynx" / os.fsdecode(b"a\xff.png")).write_bytes(b"a"), "its name is not in UTF-8"),
        (lambda pets: (pets / os.fsdecode(b"\xff")).mkdir(), "its name is not in UTF-8"),
    ],
)
def test_a_folder_that_is_laid_out_otherwise_is_refused(make, message, pets):
    make(pets)
    with pytest.raises(DataError, match=message):
        read(pets)


def test_a_folder_without_classes_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"a")
    with pytest.raises(DataError, match="holds no sub-folders"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"sphinx": "a"}, r"data.labels: sphinx is no sub-folder \(did you mean sphynx\?\)"),
        ({"sphynx": "a"}, "data.labels: has no great_dane; name every sub-folder"),
        ({"sphynx": " ", "great_dane": "a"}, "data.labels: sphynx has no text"),
    ],
)
def test_labels_that_do_not_fit_the_folder_are_refused(labels, message, pets):
    with pytest.raises(DataError, match=message):
        read(pets, labels=labels)


def test_the_source_changes_with_a_photo_its_name_and_its_class(pets):
    def now():
        return source_sha256(str(pets), "image-folder")

    seen = [now()]
    for change in (
        lambda: (pets / "sphynx" / "0.JPG").write_bytes(b"other"),
        lambda: (pets / "sphynx" / "0.JPG").rename(pets / "sphynx" / "00.JPG"),
        lambda: (pets / "sphynx" / "00.JPG").rename(pets / "great_dane" / "00.JPG"),
    ):
        change()
        seen.append(now())
    assert len(set(seen)) == 4 and len(find_source_files(str(pets), "image-folder")) == 14


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prompt": None}, "data.prompt: is missing"),
        ({"format": "auto"}, "data.prompt: is for data.format image-folder"),
        ({"held_out": 0.1}, "data.held_out: 0.1 was given, and data.eval is not data.train"),
        ({"eval": "pets"}, "data.eval: is data.train; set data.held_out"),
        ({"train": {"task": "verilog", "rows": 3}}, "data.train: rows to make were given"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(data, message):
    values = {"train": "pets", "format": "image-folder", "prompt": "a"} | data
    with pytest.raises(RecipeError, match=message):
        build_recipe({"checkpoint": "x", "data": values})


def test_labels_of_any_name_survive_the_recipes_file(tmp_path):
    from gemsmith.recipe.load import load_recipe

    labels = {"yes": "Yes", "n02: dog": "a: b", "1": "one", "great_dane": "Great Dane", "é-é": "ö", "null": "no"}
    data = {"train": "/pets", "format": "image-folder", "prompt": "a", "labels": labels}
    recipe = build_recipe({"checkpoint": "/x", "data": data})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


@pytest.fixture
def labeled(tmp_path):
    folder = tmp_path / "labeled"
    (folder / "b").mkdir(parents=True)
    for name in ("1.png", "2.png", "b/1.png", "b/unlabeled.png"):
        (folder / name).write_bytes(name.encode())
    (folder / "metadata.csv").write_text("file_name,label,id\n2.png,sphynx,7\n1.png,great_dane,8\nb/1.png,sphynx,9\n")
    return folder


def test_a_file_may_say_of_which_class_each_image_is(labeled):
    dataset = read(labeled)
    assert [(row.origin, text_of(row.messages[1])) for row in dataset.documents] == [
        ("1.png", "great dane"), ("2.png", "sphynx"), ("b/1.png", "sphynx"),
    ]  # fmt: skip
    assert text_of(dataset.documents[0].messages[0]) == "Which of great dane, sphynx?"
    assert [warning.rpartition(": ")[2] for warning in dataset.warnings] == ["1 (b/unlabeled.png)"]


def test_another_label_in_the_file_is_another_source(labeled):
    def digest():
        return source_sha256(str(labeled), "image-folder")

    first = digest()
    file = labeled / "metadata.csv"
    file.write_text(file.read_text().replace("great_dane", "sphynx"))
    assert digest() != first


def test_labels_are_read_from_lines_as_well_and_may_be_numbers(labeled):
    (labeled / "metadata.csv").unlink()
    (labeled / "metadata.jsonl").write_text('{"file_name": "1.png", "label": 3}')
    assert [text_of(row.messages[1]) for row in read(labeled).documents] == ["3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file_name,text\n1.png,a\n", "metadata.csv line 2: must have an image's file_name and its label; "),
        ("file_name,label\n../1.png,a\n", r"metadata.csv line 2: names \.\./1.png; must be a file below "),
        ("file_name,label\n1.png,a\n1.png,b\n", "1.png is of two classes, a and b; keep one"),
        ("file_name,label\n", "metadata.csv: names no image"),
    ],
)
def test_a_file_of_labels_that_says_none_is_refused(text, message, labeled):
    (labeled / "metadata.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read(labeled)


def test_images_with_labels_that_are_read_as_rows_are_told_their_format(labeled):
    with pytest.raises(DataError, match=r"has the columns file_name, label, id \(images with a label each are of data"):
        read_dataset(str(labeled))
