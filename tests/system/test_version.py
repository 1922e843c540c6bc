import ast
import tomllib
from pathlib import Path

import yaml

import gemsmith
from gemsmith.system.version import __version__

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_packages_own_and_that_of_the_citation():
    assert gemsmith.__version__ is __version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == __version__


def test_the_version_that_is_built_is_read_from_one_line_without_an_import():
    dynamic = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["dynamic"]
    module, _, name = dynamic["version"]["attr"].rpartition(".")
    source = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
    found = [ast.literal_eval(node.value) for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    assert (name, found) == ("__version__", [__version__])
