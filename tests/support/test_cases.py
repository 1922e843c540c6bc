"""A table in one test: every case is tried, and each that fails is told by itself."""

TABLE = """
import pytest
from support.cases import each

@pytest.fixture
def seen():
    return []

@each(("number", "word"), [(1, "a"), (2, "b"), (3, "c")])
@each("sign", "+-")
def test_table(sign, seen, number, word):
    seen.append(f"{sign}{number}{word}")
    assert number != 2, seen
"""


def test_every_case_is_tried_and_each_that_fails_is_told(pytester):
    pytester.makepyfile(TABLE)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["*['+1a', '-1a', '+2b']*", "*['+1a', '-1a', '+2b', '-2b']*"])
