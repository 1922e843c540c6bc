"""Shared by the tests of the data part: a tokenizer whose ids can be worked out by hand, and runs over rows.

Ids up to 363 are those of every Gemma 4 tokenizer here: special tokens, \\n = 107, and bytes (108 + byte). Then: a =
364 … z = 389, ▁ = 390, us use user = 391 … 393, mo … model = 394 … 397, sy … system = 398 … 402, wi wir wire ▁wire =
403 … 406
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gemsmith.data.render import Renderer, open_renderer
from gemsmith.data.rows import Document
from gemsmith.messages import text_message
from gemsmith.recipe_file import build_recipe
from gemsmith.run import Run, open_run
from gemsmith.testing.tiny import make_tokenizer

WORDS = ("user", "model", "system", "wire", "▁wire")


def write_plain_tokenizer(folder: Path) -> None:
    """Writes the tokenizer described above, with the template and config of the tiny checkpoints."""
    make_tokenizer(folder)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    pieces = {piece: number for piece, number in values["model"]["vocab"].items() if number < 364}
    merges = []
    for letter in "abcdefghijklmnopqrstuvwxyz▁":
        pieces[letter] = len(pieces)
    for word in WORDS:
        # ▁wire joins ▁ to the whole word, the others grow letter by letter.
        steps = [("▁", "wire")] if word == "▁wire" else [(word[:end], word[end]) for end in range(1, len(word))]
        for left, right in steps:
            pieces[left + right] = len(pieces)
            merges.append([left, right])
    values["model"] |= {"vocab": pieces, "merges": merges}
    file.write_text(json.dumps(values))


@pytest.fixture
def tokenizer_folder(tmp_path) -> Path:
    folder = tmp_path / "tokenizer"
    write_plain_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tiny_checkpoint) -> Path:
    """A tiny checkpoint with the tokenizer described above. Tests must not write into it."""
    folder = tmp_path_factory.mktemp("data") / "checkpoint"
    shutil.copytree(tiny_checkpoint("tiny-31b"), folder)
    write_plain_tokenizer(folder)
    return folder


@pytest.fixture
def renderer(tokenizer_folder) -> Renderer:
    return open_renderer(tokenizer_folder)


@pytest.fixture
def document() -> Callable[..., Document]:
    """Returns a document of `role=content` turns: `document("user=hi", "assistant=hello")`."""

    def make(*turns: str) -> Document:
        pairs = [turn.split("=", 1) for turn in turns]
        return Document(messages=tuple(text_message(*pair) for pair in pairs), origin="rows.jsonl line 1")

    return make


@pytest.fixture
def write_rows(tmp_path) -> Callable[..., Path]:
    """Writes rows as JSONL and returns the file."""

    def write(*rows: object, name: str = "rows.jsonl") -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write


@pytest.fixture
def make_run(tmp_path, checkpoint) -> Callable[..., Run]:
    """Returns a run over a data file: `make_run(file, {"max_length": 64}, {"epochs": 2})`."""

    def make(
        source: object, data: dict | None = None, train: dict | None = None, *, name: str = "run", **recipe: object
    ) -> Run:
        train_source = str(source) if isinstance(source, Path) else source
        values = {
            "checkpoint": str(checkpoint),
            "data": {"train": train_source, "max_length": 128} | (data or {}),
            "train": train or {},
        }
        return open_run(tmp_path / name, build_recipe(values | recipe))

    return make
