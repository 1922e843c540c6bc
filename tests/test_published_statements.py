"""Each row of docs/published.yaml names what it rests on, and that is there; the page is made from the rows."""

import importlib
import json
from pathlib import Path

import click
import pytest

from gemsmith.analysis.published import read_published, reanalyze
from gemsmith.cli import cli
from gemsmith.recipe.load import default_values, load_recipe, plain_values

ROOT = Path(__file__).parents[1]
VERDICTS = ("yes", "in code", "otherwise", "partly", "no", "nothing")


@pytest.fixture(scope="module")
def pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield importlib.import_module("docs_pages")


@pytest.fixture(scope="module")
def source_text():
    files = [file for file in (ROOT / "src").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files).lower()


@pytest.fixture(scope="module")
def verdicts():
    return reanalyze(read_published()).verdicts


def test_every_statement_is_judged_and_rests_on_something_that_is_there(pages, source_text, verdicts, subtests):
    rows = pages.statements()
    assert [row["n"] for row in rows] == list(range(1, 102))
    assert sum(len(row.get("held", ())) for row in rows) > 150
    for row in rows:
        with subtests.test(f"{row['n']}: {row['says']}"):
            assert row["verdict"] in VERDICTS and row["says"] and row["here"] and row["from"]
            assert row.get("held") or row["verdict"] in ("no", "nothing")
            for held in row.get("held", ()):
                assert holds(held, source_text, verdicts), f"row {row['n']}: {held}: judge it again"


def holds(held, source_text, verdicts):
    """Whether one line of `held` is so; the forms are those at the top of docs/published.yaml."""
    first, _, rest = held.partition(" ")
    if first == "gemsmith":
        return has_option(*rest.split())
    if first in ("holds:", "fails:"):
        return [each.holds for each in verdicts if each.claim.startswith(rest)] == [first == "holds:"]
    if first == "absent:":
        return rest not in source_text
    if "::" in held:
        file, _, text = held.partition("::")
        return text in (ROOT / file).read_text(encoding="utf-8")
    values = default_values() if first == "default" else plain_values(load_recipe(ROOT / first))
    key, _, value = rest.partition("=")
    return key in values and value in (str(values[key]), json.dumps(values[key]), json.dumps(values[key]).strip('"'))


def has_option(*words):
    """("launch", "start", "--spot") -> whether that verb has that option."""
    verb = cli
    for word in (word for word in words if not word.startswith("-")):
        verb = verb.get_command(click.Context(verb), word)
    return {*words[-1:]} <= {name for parameter in verb.params for name in parameter.opts} or not words[-1].startswith(
        "-"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        *("default lora.rank=63", "default lora.ranks=64", "recipes/pets_31b.yaml train.epochs=4"),
        *("gemsmith plan --sweeps", "Makefile::no such target", "absent: gemma", "holds: v6e-8 for 21.52"),
    ],
)
def test_what_is_not_so_does_not_hold(wrong, source_text, verdicts):
    assert not holds(wrong, source_text, verdicts)


def test_the_page_has_every_statement_once_and_how_many_there_are_of_each_verdict(pages):
    rows, made = pages.statements(), pages.fill_in((ROOT / "docs" / "published.md").read_text(encoding="utf-8"))
    for row in rows:
        assert made.count(f"| {row['n']} | {row['says']} | {row['from']} | {row['here']} | {row['verdict']} |") == 1
    assert f"Of {len(rows)} statements: yes {sum(row['verdict'] == 'yes' for row in rows)}, " in made


def test_plans_of_the_pets_two_jobs_leave_time_for_their_answers(pages):
    jobs = json.loads((pages.RECORDS / "plan_accuracy.json").read_text(encoding="utf-8"))["published_jobs"]
    assert [(job["hours"], job["steps"], job["answers"]) for job in jobs.values()] == [
        (4.25, 690, 7338),
        (0.833, 132, 400),
    ]
    for job in jobs.values():
        assert job["plan_hours"][0] < job["hours"] and job["plan_step_s"][0] < job["most_step_s"]
    assert "| 4.25 | 2.29 to 4.6 | 7,338 |" in pages.plan_jobs_table()
