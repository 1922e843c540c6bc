"""Shared by the tests of the data part: a tiny tokenizer with a template in Gemma 4's form, and runs over rows."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gemsmith.checkpoint.tiny import make_tokenizer
from gemsmith.data.render import Renderer, open_renderer
from gemsmith.data.rows import Document
from gemsmith.recipe import build_recipe
from gemsmith.run import Run, open_run


@pytest.fixture
def tokenizer_folder(tmp_path) -> Path:
    folder = tmp_path / "tokenizer"
    make_tokenizer(folder)
    return folder


@pytest.fixture
def renderer(tokenizer_folder) -> Renderer:
    return open_renderer(tokenizer_folder)


@pytest.fixture
def document() -> Callable[..., Document]:
    """Returns a document of `role=content` turns: `document("user=hi", "assistant=hello")`."""

    def make(*turns: str) -> Document:
        pairs = [turn.split("=", 1) for turn in turns]
        return Document(messages=tuple({"role": role, "content": content} for role, content in pairs), origin="rows.jsonl line 1")

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
def make_run(tmp_path, tiny_checkpoint) -> Callable[..., Run]:
    """Returns a run over a data file: `make_run(file, {"max_length": 64}, {"epochs": 2})`."""

    def make(source: object, data: dict | None = None, train: dict | None = None, *, name: str = "run", **recipe: object) -> Run:
        train_source = str(source) if isinstance(source, Path) else source
        values = {
            "checkpoint": str(tiny_checkpoint("tiny-31b")),
            "data": {"train": train_source, "max_length": 128} | (data or {}),
            "train": train or {},
        }
        return open_run(tmp_path / name, build_recipe(values | recipe))

    return make
