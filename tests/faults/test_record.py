"""The list of what may go wrong names tests that are there, and its record says that nothing was lost."""

import ast
from pathlib import Path

from support.faults import PLACES, ROWS

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_list_names_is_there_once():
    named = [test for row in ROWS.values() for key in ("tests", "long") for test in row.get(key, [])]
    assert len(named) == len({*named}) == len(PLACES) > 80
    functions = {
        f"{file}::{node.name}"
        for file in {test.partition("::")[0] for test in named}
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert not {*named} - functions


def test_every_row_says_what_happens_and_what_to_do():
    assert len(ROWS) > 20
    for fault, row in ROWS.items():
        assert row["ends"] in {"survived", "told"} and row["then"] and row["do"], fault
        assert row["tests"] or row["long"], fault
