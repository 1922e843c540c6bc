"""Who may import whom, by name; and that the command line stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gemsmith"

# Top imports down; a part never imports another of its own line.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"launch"},
    {"pipeline", "port", "testing"},
    {"report"},
    {"verify", "chat", "compare"},
    {"plan", "evals", "bench"},
    {"aot"},
    {"train", "export", "serve"},
    {"models", "data"},
    {"run"},
    {"resolve"},
    {"sizing", "lengths"},
    {"checkpoint"},
    {"stages", "provenance"},
    {"recipe_file"},
    {"bench_records", "eval_records", "plan_records"},
    {"recipe_checks", "recipe_keys"},
    {"recipe", "records"},
    {"execution"},
    {"zoo", "hardware", "tasks", "grids"},
    {"pictures"},
    {"plain_json"},
    {"files", "bucket"},
    {"plain_yaml", "patterns", "lock"},
    {"terminal", "program", "sandbox", "worker_process"},
    {"errors", "characters", "messages", "signals", "version"},
]
RANK = {part: rank for rank, layer in enumerate(reversed(LAYERS)) for part in layer}

# Heavy libraries, and the only parts that may import each.
HEAVY = {
    "jax": {"models", "train", "aot", "testing"},
    "flax": {"models", "train", "aot"},
    "qwix": {"models", "train"},
    "tunix": {"train"},
    "optax": {"train"},
    "orbax": {"train", "export"},
    "grain": {"data"},
    "PIL": {"pictures"},
    "torch": {"export", "verify", "train"},
    "transformers": {"data", "export", "verify", "train"},
    "peft": {"export", "verify", "train"},
    "accelerate": {"train"},
    "matplotlib": {"report"},
    "gradio": {"chat"},
    "trl": {"train"},
    "datasets": {"data", "train"},
}


def part_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield str(node.module)
            if node.module == "gemsmith":
                yield from (f"gemsmith.{alias.name}" for alias in node.names)


FILES = sorted(file for file in SOURCE.rglob("*.py") if file.name != "__init__.py" or file.parent != SOURCE)


def test_the_source_files_are_found():
    assert len(FILES) > 30


def test_every_part_has_its_place_in_the_table():
    """An import of a part that the table lacks would be allowed from anywhere."""
    assert {part_of(file) for file in FILES} == RANK.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_down_and_never_sideways(file):
    part = part_of(file)
    for name in imports_of(file):
        if not name.startswith("gemsmith."):
            continue
        other = name.split(".")[1]
        if other != part:
            assert RANK.get(other, len(LAYERS)) < RANK[part], f"{file} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_heavy_libraries_stay_in_their_parts(file):
    for name in imports_of(file):
        library = name.split(".")[0]
        assert part_of(file) in HEAVY.get(library, {part_of(file)}), f"{file} imports {name}"


# Each backend has its folder, and its libraries are imported nowhere else in training.
BACKENDS = {
    "tunix": {"jax", "flax", "qwix", "tunix", "optax", "orbax"},
    "trl": {"torch", "transformers", "trl", "peft", "datasets"},
}


@pytest.mark.parametrize(
    "file", sorted((SOURCE / "train").rglob("*.py")), ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_each_training_backend_imports_its_own_libraries_only(file):
    imported = {name.split(".")[0] for name in imports_of(file)}
    others = set().union(*(libraries for backend, libraries in BACKENDS.items() if backend != file.parent.name))
    assert not imported & others


def loaded_by(code: str) -> set[str]:
    script = f"import sys; {code}; print(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_the_command_line_loads_nothing_heavy():
    assert not loaded_by("import gemsmith.cli") & (HEAVY.keys() | {"numpy", "pydantic", "rich", "yaml"})


def test_planning_loads_nothing_heavy():
    assert not loaded_by("import gemsmith.plan.stage, gemsmith.runs.resolve, gemsmith.runs.run") & (
        HEAVY.keys() | {"numpy", "rich"}
    )


def test_a_training_session_loads_no_backend():
    assert not loaded_by("import gemsmith.train.loop, gemsmith.train.inputs") & {"jax", "torch", *BACKENDS}
