"""Words encoded one by one come to the ids of the whole text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from gemsmith.data.encode import WordEncoder
from tiny_checkpoints import make_tokenizer

PIECES = [
    " ",
    "   ",
    "▁",
    "\n",
    "\n\n",
    "the",
    "cat",
    "module",
    "a",
    "x",
    "<|turn>",
    "<bos>",
    "é",
    "猫",
    "\u00a0",
    "😀",
    "<0x41>",
]


def made_texts() -> list[str]:
    random = np.random.default_rng(0)
    made = ["".join(random.choice(PIECES, size)) for size in random.integers(0, 20, 2000)]
    return ["a x a  x xa x", "a▁ x ▁ ▁▁ a", "", "  ", "the  ", *made]


def changed(base: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Tokenizer:
    spec = json.loads((base / "tokenizer.json").read_text())
    change(spec)
    return Tokenizer.from_str(json.dumps(spec))


def add_merges(spec: dict[str, Any], *pairs: tuple[str, str]) -> None:
    for left, right in pairs:
        spec["model"]["vocab"][left + right] = len(spec["model"]["vocab"]) + 1000
        spec["model"]["merges"].insert(0, [left, right])


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def gemma_pre_tokenizer(spec: dict[str, Any]) -> None:
    spec["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
    }  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_tokenizer(folder)
    return folder


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "as it is": lambda _: None,
    "as Gemma's": gemma_pre_tokenizer,
    "with a token that holds a space": lambda spec: add_merges(spec, ("a", "▁"), ("a▁", "x"), ("▁", "▁")),
    "with a token of spaces beside that of the sign": lambda spec: (
        spec["added_tokens"].append(dict(spec["added_tokens"][0], id=5000, content=" x", special=False))
        or add_merges(spec, ("▁", "x"))
    ),
    "with an added token that holds a space": lambda spec: spec["added_tokens"].append(
        dict(spec["added_tokens"][0], id=5000, content="a x", special=False)
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_ids_are_those_of_the_whole_text(base: Path, name: str) -> None:
    tokenizer = changed(base, CHANGES[name])
    encoder = WordEncoder(tokenizer)
    assert encoder._joining
    texts = made_texts()
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == ids_of(tokenizer, text), text


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(
            normalizer={"type": "Sequence", "normalizers": [spec["normalizer"], {"type": "NFKC"}]}
        ),
        lambda spec: spec.update(pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}),
        lambda spec: spec["model"].update(ignore_merges=True),
        lambda spec: spec["model"]["vocab"].pop("<0x41>"),
        lambda spec: spec["added_tokens"][0].update(rstrip=True),
        lambda spec: add_merges(spec, ("<0xE2>", "▁")),
    ],
)
def test_a_tokenizer_whose_words_touch_encodes_whole_texts(
    base: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    tokenizer = changed(base, change)
    encoder = WordEncoder(tokenizer)
    assert not encoder._joining
    text = "the cat <pad> sat ＜ on 😀 a"
    assert encoder.encode([text])[0].tolist() == ids_of(tokenizer, text)


def test_what_is_remembered_is_bounded(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemsmith.data.encode._MOST_WORDS", 3)
    encoder = WordEncoder(changed(base))
    encoder.encode(["x" * 65, "a cat"])
    assert set(encoder._known) == {"a", " cat"}
    encoder.encode(["b c"])
    assert not encoder._known
