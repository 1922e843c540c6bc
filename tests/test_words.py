"""Words of our own that were retired for the field's stay retired."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RETIRED = {
    "words' table": "embedding matrix",
    "made plain": "dequantized",
    "towers carried": "encoders copied",
    "computed again": "recomputed",
    "is no number": "is NaN or infinite, or: is not a number",
    "joined adapters": "fused LoRA",
    "ask_experts": "top-k experts",
    "Stretch": "span",
}
"""What is not to be written -> what is."""
FOLDERS = ("src", "docs", "recipes", "examples")
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".html", ".css", ".ipynb"}
FILES = [
    ROOT / "README.md",
    *(file for name in FOLDERS for file in (ROOT / name).rglob("*") if file.suffix in SUFFIXES),
]


def test_the_files_are_found():
    assert len(FILES) > 150 and {file.suffix for file in FILES} >= {".py", ".md", ".yaml", ".html"}


@pytest.mark.parametrize("word", RETIRED)
def test_retired_words_are_in_no_file(word):
    # A phrase may be broken over two lines, and over two lines of comments.
    found = [
        str(file.relative_to(ROOT))
        for file in FILES
        if word in " ".join(file.read_text(encoding="utf-8").replace("#", " ").split())
    ]
    assert not found, f"write instead: {RETIRED[word]}"
