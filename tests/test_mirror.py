"""Every room has its tests where a reader looks for them: those of src/gemsmith/plan/aot in tests/plan/aot."""

import runpy
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "gemsmith"


def test_every_room_has_its_tests():
    rooms = {file.parent.relative_to(SOURCE) for file in SOURCE.rglob("*.py")}
    assert len(rooms) > 20
    tested = {file.parent.relative_to(TESTS) for file in TESTS.rglob("test_*.py")}
    tested |= {room for room in rooms if room.parent in tested}
    assert not rooms - tested, "rooms without tests"


def test_the_files_whose_mutants_are_looked_at_are_there():
    core = runpy.run_path(str(TESTS.parent / "scripts" / "mutants.py"))["CORE"]
    assert len(core) > 20
    assert not [name for name in core if not (SOURCE / f"{name}.py").is_file()]
