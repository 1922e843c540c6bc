"""The list of what may go wrong names tests that are there, and its record says that nothing was lost."""

import ast
import json
from pathlib import Path

import pytest
import yaml

from support.faults import MARKS, PLACES, ROWS

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


@pytest.fixture
def record():
    return json.loads((ROOT / "benchmarks" / "records" / "faults.json").read_text(encoding="utf-8"))


def test_nothing_is_lost_or_silent_in_the_record_and_it_has_every_row(record):
    assert "faults" in record
    for key, mark in MARKS.items():
        if (half := record.get(mark)) is None:  # `make test-faults-long` has not been run on this commit
            continue
        assert half["total"]["lost"] == half["total"]["silent"] == 0
        assert half["faults"].keys() == {fault for fault, row in ROWS.items() if row.get(key)}
    assert "/tmp" not in json.dumps(record) and "/home" not in json.dumps(record)


def test_every_guard_was_broken_and_its_words_are_there_to_be_broken_again(record):
    guards = yaml.safe_load((ROOT / "tests" / "faults" / "guards.yaml").read_text(encoding="utf-8"))
    assert len(guards) > 10 and all((ROOT / each["file"]).read_text().count(each["words"]) == 1 for each in guards)
    assert [each["guard"] for each in record["guards"] if each["failed"]] == [each["guard"] for each in guards]
