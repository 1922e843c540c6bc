"""Each extra brings what the parts that it is for import, and installs by pip alone into a fresh environment."""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gemsmith.cli.options import _EXTRAS, naming_extra, part
from gemsmith.errors import MachineError

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gemsmith"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# A part -> the extra that it needs; a part that is not here needs none.
NEEDS = _EXTRAS | {"files": "data", "testing": "dev"}
# What a part imports only where something else has brought it, or says itself how to get.
ELSEWHERE = {
    ("export", "orbax"),  # reads what the JAX backend has saved
    ("bench", "vllm"),  # runs in vLLM's own environment
    ("train.trl", "bitsandbytes"),  # only for train.dtype nf4, whose error names it
}


def normalised(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def distributions(extra: str | None) -> set[str]:
    """All that is declared for an extra, its own extras of Gemsmith included, and for Gemsmith without any."""
    declared = set()
    for requirement in PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else []):
        name = normalised(requirement)
        if name == "gemsmith":
            for inner in requirement.partition("[")[2].partition("]")[0].split(","):
                declared |= distributions(inner)
        else:
            declared.add(name)
    return declared


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts)


def extra_of(module: str) -> str | None:
    return next((NEEDS[name] for name in NEEDS if f"{module}.".startswith(f"{name}.")), None)


def third_party_imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    return names - sys.stdlib_module_names - {"gemsmith"}


@functools.cache
def distributions_of(library: str) -> set[str]:
    return {normalised(name) for name in metadata.packages_distributions().get(library, [library])}


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_the_extra_of_a_part_declares_what_the_part_imports(file):
    module = module_of(file)
    declared = distributions(extra_of(module))
    for library in sorted(third_party_imports(file)):
        if not any(f"{module}.".startswith(f"{name}.") and library == there for name, there in ELSEWHERE):
            assert distributions_of(library) & declared, f"{module} imports {library}: add it to {extra_of(module)}"


def test_every_exception_is_still_needed():
    imported = {(module_of(file), library) for file in FILES for library in third_party_imports(file)}
    for name, library in ELSEWHERE:
        assert any(f"{module}.".startswith(f"{name}.") and library == there for module, there in imported), name


def test_training_in_jax_needs_no_transformers_and_trl_no_tunix():
    assert not distributions("jax") & {"transformers", "torch", "peft", "trl"}
    assert not distributions("trl") & {"google-tunix", "jax", "flax", "qwix"}


def test_the_extras_that_error_lines_name_are_there():
    named = {
        name
        for file in FILES
        for name in re.findall(r"pip install 'gemsmith\[(\w+)\]'", file.read_text(encoding="utf-8"))
    }
    assert named | set(NEEDS.values()) <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("data.pack", "numpy", "data"),
        ("models.remat", "jax", "jax"),
        ("train.trl.loss", "torch", "trl"),
        ("evals.ask", "httpx", "serve"),
        ("verify.logits", "numpy", "verify"),
    ],
)
def test_a_missing_library_is_one_line_with_the_extra_that_has_it(monkeypatch, module, library, extra):
    for name in list(sys.modules):
        if name == f"gemsmith.{module}":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    expected = rf"^{library} is not installed, which this needs; run: pip install 'gemsmith\[{extra}\]'$"
    with pytest.raises(MachineError, match=expected):
        part(module)


def test_a_stage_that_misses_a_library_while_it_runs_is_one_line_too(monkeypatch):
    from gemsmith.data import batches

    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(MachineError, match=r"^grain is not installed, .*'gemsmith\[data\]'$"), naming_extra():
        batches.shuffled_order(3, 0)


def test_a_fault_of_gemsmiths_own_stays_a_fault():
    with pytest.raises(ModuleNotFoundError, match="gemsmith"):
        part("no_such_part")


def read_lock(name: str) -> list[str]:
    return (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8").split()


def test_locks_of_one_environment_name_each_package_once():
    pinned = [normalised(line) for line in read_lock("train") + read_lock("dev")]
    assert len(pinned) == len(set(pinned))


def test_the_locks_have_what_the_extras_ask_for():
    pinned = {normalised(line): line.partition("==")[2] for line in read_lock("train") + read_lock("dev")}
    asked = [Requirement(item) for extra in PROJECT["optional-dependencies"].values() for item in extra]
    checked = [item for item in asked if normalised(item.name) in pinned]
    assert len(checked) > 30
    wrong = [str(item) for item in checked if pinned[normalised(item.name)] not in item.specifier]
    assert not wrong


RENDER = """
import sys
from gemsmith import open_run
from gemsmith.report.stage import report
page = report(open_run(sys.argv[1]))
assert "<svg" in page.read_text(encoding="utf-8")
"""
TRAINING = """
import importlib, pkgutil, sys
import gemsmith.train.tunix, gemsmith.models
for package in (gemsmith.train.tunix, gemsmith.models):
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)
import gemsmith.data.stage, gemsmith.export.stage, gemsmith.plan.stage
assert "transformers" not in sys.modules and "torch" not in sys.modules
"""


@pytest.fixture
def install(tmp_path):
    """Returns the Python of a fresh environment with one extra: `install("report")`."""

    def make(extra: str) -> str:
        folder = tmp_path / "env"
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        python = str(folder / "bin" / "python")
        quiet = [python, "-m", "pip", "-q", "--disable-pip-version-check"]
        probe = subprocess.run([*quiet, "download", "--no-deps", "-d", str(tmp_path), "click"], check=False)
        if probe.returncode:
            pytest.skip("pip reaches no package index here")
        subprocess.run([*quiet, "install", f"{ROOT}[{extra}]"], check=True)
        return python

    return make


@pytest.mark.slow
def test_the_report_extra_renders_a_report_from_records_alone(install, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for file in (ROOT / "benchmarks" / "records" / "demo").glob("*.json"):
        (run / file.name).write_bytes(file.read_bytes())
    (run / "recipe.yaml").write_bytes((ROOT / "recipes" / "demo.yaml").read_bytes())
    subprocess.run([install("report"), "-c", RENDER, str(run)], check=True, cwd=tmp_path, env=plain_environment())


@pytest.mark.slow
def test_the_jax_extra_imports_training_without_transformers(install, tmp_path):
    subprocess.run([install("jax"), "-c", TRAINING], check=True, cwd=tmp_path, env=plain_environment())


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
