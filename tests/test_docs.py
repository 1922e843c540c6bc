"""The documentation's made parts are complete, and what it names is there. `make check` builds the site."""

import ast
import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from gemsmith.recipe.load import default_values
from gemsmith.runs.stages import STAGES

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("docs_pages")


def test_the_pages_are_found():
    assert len(DOCS) > 15


def test_the_reference_has_every_key_with_its_default(pages):
    page = pages.recipe_page()
    for key, default in default_values().items():
        section, _, name = key.rpartition(".")
        row = next(line for line in page.splitlines() if line.startswith(f"| `{key}` |"))
        assert f"| `{json.dumps(default)}` |" in row, name
        assert len(row.split(" | ")[-1]) > 5, section
    for key in ("checkpoint", "data.train", "data.train.rows", "train.mesh.fsdp"):
        assert f"| `{key}` |" in page


def test_a_key_without_a_description_stops_the_build(pages, monkeypatch):
    schema = pages.recipe_schema()
    schema["properties"]["new"] = {"type": "integer", "default": 0}
    monkeypatch.setattr(pages, "recipe_schema", lambda: schema)
    with pytest.raises(ValueError, match="new: has no description"):
        pages.recipe_page()


def test_every_stage_has_its_row_in_both_tables(pages):
    by_hand = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in STAGES:
        assert f"\n| {name} |" in pages.stage_table() and f"\n| {name} |" in by_hand
        assert f"`{name}.json`" in by_hand


def test_the_table_of_stops_is_that_of_its_record(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    drill = importlib.import_module("sigterm")
    record = json.loads(drill.RECORD.read_text(encoding="utf-8"))
    assert record["all_as_promised"] and record["tries"] >= 40
    page = (ROOT / "docs" / "log" / "stopping.md").read_text(encoding="utf-8")
    assert "\n".join(["", *drill.table(record), ""]) in page


def test_numbers_of_performance_have_a_record_and_a_command_that_is_there(pages):
    rows = pages.performance_table().splitlines()[2:]
    assert len(rows) > 10
    for row in rows:
        command, record = re.search(r"\[`python (\S+)[^`]*`\]\(\.\./(\S+)\)", row).groups()
        assert (ROOT / command).is_file() and (ROOT / record).is_file(), row
        assert ("estimated" in row) == ("tpu_compile" in record)


def test_a_page_that_fetches_from_elsewhere_stops_the_build(pages):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert pages.on_post_page('<img src="images/report.png">', page=page)
    with pytest.raises(ValueError, match=r"index\.md: fetches https://x\.org/a\.js"):
        pages.on_post_page('<script async src="https://x.org/a.js">', page=page)


def test_files_and_commands_that_a_page_names_are_there(gemsmith_verbs, pages, subtests):
    assert len(DOCS) > 20
    for file in DOCS:
        with subtests.test(str(file.relative_to(ROOT / "docs"))):
            check_names(file, gemsmith_verbs, pages)


def check_names(file, gemsmith_verbs, pages):
    text = file.read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|src|benchmarks|scripts|recipes|examples|requirements)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    verbs = re.findall(r"(?:^|`)gemsmith (\w+)", text, flags=re.MULTILINE)
    assert [verb for verb in verbs if verb not in gemsmith_verbs] == []
    assert [name for name in re.findall(r"<!-- made: (\w+)", text) if name not in pages.TABLES] == []
    assert "<!-- made" not in pages.fill_in(text)


def test_messages_and_logs_that_troubleshooting_quotes_are_in_the_code():
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [code for code in re.findall(r"`([^`]+)`", page) if "…" in code or code.endswith((".log", ".jsonl"))]
    stretches = [stretch.strip(" ;,") for code in quoted for stretch in re.split("…|[;,] ", code)]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "src").rglob("*.py")]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    said = "\n".join(text for text in texts if isinstance(text, str))
    assert len(stretches) > 80
    assert [stretch for stretch in stretches if stretch not in said] == []


def test_functions_that_architecture_names_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = {"data.train", *(name for name in re.findall(r"`([\w.]+\.(?:json|yaml|html|toml))`", page))}
    named = set(re.findall(r"`((?:\w+\.)+\w+)`", page)) - files
    assert len(named) > 50
    missing = []
    for name in sorted(named):
        module, _, function = name.rpartition(".")
        place = ROOT / "src" / "gemsmith" / module.replace(".", "/")
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if not re.search(rf"^(def|class) {function}\b|^{function}\b.*=", text, flags=re.MULTILINE):
            missing.append(name)
    assert missing == []


@pytest.fixture(scope="session")
def gemsmith_verbs():
    from gemsmith.cli import cli

    return set(cli.commands)


def test_every_page_of_the_log_says_question_result_and_what_was_kept():
    for file in (ROOT / "docs" / "log").glob("*.md"):
        if file.name == "index.md":
            continue
        entries = file.read_text(encoding="utf-8").split("\n## ")[1:]
        assert entries
        for entry in entries:
            assert entry.count("**Question.** ") == entry.count("**Result.**") == 1, f"{file.name}: {entry[:40]}"


def test_every_page_is_in_the_navigation_once(pages):
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    def flat(items):
        for item in items:
            for value in item.values() if isinstance(item, dict) else [item]:
                yield from flat(value) if isinstance(value, list) else [value]

    listed = list(flat(nav))
    made = {"recipe.md", *pages.ROOT_PAGES.values()}
    assert sorted(listed) == sorted({*(str(file.relative_to(ROOT / "docs")) for file in DOCS), *made})


def test_the_image_is_small_enough_to_load():
    image = (ROOT / "docs" / "images" / "report.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) < 300_000
    assert int.from_bytes(image[16:20]) == 1280
