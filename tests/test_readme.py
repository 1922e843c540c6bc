"""What the README claims is what the records say, and the documentation's tree is the tree there is."""

import importlib.util
import re
from pathlib import Path

from gemsmith.recipe.load import load_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_the_one_that_the_records_give():
    script = load_script("readme_table")
    table = script.make_table(script.RECORDS / "demo")
    assert len(table.splitlines()) > 8
    assert table in README


def test_the_tree_names_every_part_and_nothing_else():
    tree = ARCHITECTURE.partition("src/gemsmith/\n")[2].partition("```")[0]
    assert tree
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    there = {
        path.name
        for path in (ROOT / "src" / "gemsmith").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert named == there - {"__init__.py", "__main__.py"}


def test_linked_files_are_there():
    links = [part.partition(")")[0] for part in README.split("](")[1:]]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_recipe_to_copy_inherits_nothing_of_the_demo():
    own = load_recipe(ROOT / "recipes" / "own.yaml")
    chosen = {key for section in ("data", "eval") for key in getattr(own, section).model_fields_set}
    assert own.model_fields_set == {"checkpoint", "data", "eval"}, "all else is a default, which suits a real model"
    assert chosen == {"train", "eval", "max_length", "scorer", "max_tokens"}
    assert own.eval.scorer == "exact"


def test_commands_of_the_readme_that_name_a_recipe_never_change_the_demos_data():
    commands = [
        line for line in README.splitlines() if re.match(r"(\.venv/bin/)?gemsmith \w+ recipes/demo\.yaml", line)
    ]
    assert not [line for line in commands if "data.train" in line or "checkpoint=" in line]


def test_the_readme_says_where_the_command_is_before_it_uses_it():
    own = README.partition("## Your own")[2]
    assert 0 < own.index("source .venv/bin/activate") < own.index("gemsmith plan")


def test_the_recipe_in_the_readme_is_a_whole_one(tmp_path):
    text = README.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "my.yaml").write_text(text)
    assert load_recipe(tmp_path / "my.yaml").data.train == str(tmp_path / "rows.jsonl")
