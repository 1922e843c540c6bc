"""No file of Python is too long to read in one go."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES = 450


def test_no_file_has_more_than_450_lines():
    lines = {
        str(file.relative_to(ROOT)): file.read_bytes().count(b"\n")
        for folder in ("src", "tests")
        for file in (ROOT / folder).rglob("*.py")
    }
    assert len(lines) > 300
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}
