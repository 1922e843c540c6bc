"""Every module has its tests where a reader looks for them: src/gemsmith/aot/clock.py in tests/aot/test_clock.py."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "gemsmith"
# Files that only gather what others hold, and `python -m gemsmith`.
NO_MODULES = {"__init__.py", "__main__.py"}
MODULES = sorted(
    str(file.relative_to(SOURCE).with_suffix("")) for file in SOURCE.rglob("*.py") if file.name not in NO_MODULES
)

# Modules whose tests lie elsewhere still.
MISSING = [
    "export/reverse",
    "export/threads",
    "models/heads",
    "models/layer",
    "models/sharding",
    "port/axolotl",
    "port/base",
    "port/command",
    "port/data",
    "port/llama_factory",
    "port/peft",
    "port/read",
    "port/rules",
    "port/show",
    "port/stage",
    "port/table",
    "port/trainer",
    "report/charts",
    "report/drawing",
    "report/numbers",
    "report/stage",
    "report/summary",
    "serve/engine",
    "serve/guard",
    "serve/process",
    "train/session",
    "train/trl/group",
    "train/trl/launch",
    "train/trl/loss",
    "train/trl/trainer",
    "train/trl/worker",
    "train/tunix/checkpoints",
    "train/tunix/checksums",
    "train/tunix/compiling",
    "verify/layer_streaming",
    "verify/logits",
]


def mirrored(module: str) -> Path:
    path = Path(module)
    return TESTS / path.parent / f"test_{path.name}.py"


def test_the_modules_are_found():
    assert len(MODULES) > 150


@pytest.mark.parametrize("module", [module for module in MODULES if module not in MISSING])
def test_every_module_has_its_test_file(module):
    assert mirrored(module).is_file(), f"src/gemsmith/{module}.py has no {mirrored(module).relative_to(TESTS)}"


def test_what_is_called_missing_is_a_module_without_a_test_file_and_named_once_in_order():
    assert sorted(set(MISSING)) == MISSING
    for module in MISSING:
        assert module in MODULES, f"{module} is no module of src any more: take it out of MISSING"
        assert not mirrored(module).exists(), f"{module} has its test file: take it out of MISSING"
