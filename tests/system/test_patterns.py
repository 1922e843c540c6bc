import pytest

from gemsmith.system import patterns
from gemsmith.system.patterns import compile_pattern, search


def test_a_search_finds_the_first_match_and_a_whole_one_only_all_of_the_text():
    pattern = compile_pattern(r"\d+(x)?")
    assert search(pattern, "a 12 3").group() == "12"
    assert search(pattern, "12x", whole=True).groups() == ("x",) and search(pattern, "12 ", whole=True) is None


def test_a_match_that_takes_too_long_is_an_error(monkeypatch):
    monkeypatch.setattr(patterns, "TIMEOUT_S", 0.1)
    with pytest.raises(ValueError, match="takes too long; write it without nested repeats"):
        search(compile_pattern(r"(?:a|aa|a?a)+\d(?:a|aa)+b"), f"{'a' * 60}1{'a' * 60}c", whole=True)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(?:(?:a{1000}){1000}){1000}", "its counted repeats are too many"),
        ("a{1000000000}", "its counted repeats are too many"),
        ("(", "missing"),
        ("(" * 5000, "recursion"),
    ],
)
def test_what_is_no_pattern_or_too_large_a_one_is_one_line(pattern, said):
    with pytest.raises(ValueError, match=said):
        compile_pattern(pattern)


def test_ordinary_counted_repeats_are_taken():
    compile_pattern(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(?::\d{2}){1,2}" * 20)
