"""Every room has its tests where a reader looks for them: those of src/gemsmith/plan/aot in tests/plan/aot."""

from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "gemsmith"


def test_every_room_has_its_tests():
    rooms = {file.parent.relative_to(SOURCE) for file in SOURCE.rglob("*.py")}
    assert len(rooms) > 20
    tested = {file.parent.relative_to(TESTS) for file in TESTS.rglob("test_*.py")}
    tested |= {room for room in rooms if room.parent in tested}
    assert not rooms - tested, "rooms without tests"
