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

from gemsmith.data.dataset import Document
from gemsmith.data.tokenize import Renderer, open_renderer
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.run import Run, open_run
from gemsmith.tasks.messages import text_message
from tiny_checkpoints import make_tokenizer

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


IMAGE, BEGIN, END = 10, 11, 12
"""The tokens of images in `image_checkpoint`."""


@pytest.fixture(scope="session")
def image_checkpoint(tmp_path_factory, checkpoint) -> Path:
    """The same checkpoint, which takes images: patches of 4 pixels, 3 by 3 of them to a soft token."""
    folder = tmp_path_factory.mktemp("data") / "images"
    shutil.copytree(checkpoint, folder)
    add_images(folder)
    return folder


def add_images(folder: Path) -> None:
    """Gives a checkpoint's folder the tokens, the template and the config of one that takes images."""
    config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json"))
    config["vision_config"] = {"patch_size": 4, "pooling_kernel_size": 3}
    config |= {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END}
    for number, text in ((IMAGE, "<|image|>"), (BEGIN, "<|image>"), (END, "<image|>")):
        tokenizer["model"]["vocab"].pop(f"<unused{number}>")
        tokenizer["model"]["vocab"][text] = number
        tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": number, "content": text})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    written = template.read_text().replace(
        "{{- part.text | trim -}}", "{{- '<|image|>' if part.type == 'image' else part.text | trim -}}"
    )
    template.write_text(written)


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
