"""A docstring's first line is one sentence that says what comes out, or an example of it; details stand below."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gemsmith"
FILES = sorted(SOURCE.rglob("*.py"))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
EXAMPLE = (" -> ", " → ", "…")
"""What is in a first line that shows input and output instead: [1 1 2 0] -> [(0, 2), (2, 3)]."""


def docstrings_of(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The line and the lines of every docstring."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text.split("\n")


def is_one_sentence(lines: list[str]) -> bool:
    first, *below = lines
    ends = first.endswith(".") or any(sign in first for sign in EXAMPLE)
    return ends and not (below and below[0])


def test_the_docstrings_are_found():
    assert sum(1 for file in FILES for _ in docstrings_of(file)) > 700


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_first_line_is_a_sentence_with_nothing_right_below_it(file):
    wrong = [f"{file.name}:{line}: {lines[0]}" for line, lines in docstrings_of(file) if not is_one_sentence(lines)]
    assert not wrong
