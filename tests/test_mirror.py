"""Every module has its tests where a reader looks for them: src/gemsmith/plan/aot/collectives.py in tests/plan/aot/test_clock.py."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "gemsmith"
# Files that only gather what others hold, and `python -m gemsmith`.
NO_MODULES = {"__init__.py", "__main__.py"}
MODULES = sorted(
    str(file.relative_to(SOURCE).with_suffix("")) for file in SOURCE.rglob("*.py") if file.name not in NO_MODULES
)


def mirrored(module: str) -> Path:
    path = Path(module)
    return TESTS / path.parent / f"test_{path.name}.py"


def test_the_modules_are_found():
    assert len(MODULES) > 150


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_test_file(module):
    assert mirrored(module).is_file(), f"src/gemsmith/{module}.py has no {mirrored(module).relative_to(TESTS)}"
