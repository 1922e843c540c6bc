"""Errors as a person reads them: exit codes, near matches, and one line of a library's many."""

import errno
import subprocess
import sys

import pytest

from gemsmith import errors
from gemsmith.errors import (
    USERS_ERRNOS,
    GemsmithError,
    InputError,
    Terminated,
    explain_os_error,
    first_line,
    last_line,
    some,
    suggest,
)
from support.cases import each


def test_only_what_the_user_can_mend_has_an_exit_code_of_its_own():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GemsmithError)]
    assert len(kinds) > 10
    for kind in kinds:
        assert kind.exit_code == (2 if issubclass(kind, InputError) else 1), kind


def test_what_nobody_catches_of_sigterm_is_no_error_and_ends_with_its_code():
    assert not issubclass(Terminated, Exception)
    ended = subprocess.run(
        [sys.executable, "-c", "from gemsmith.errors import Terminated; raise Terminated('told')"],
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, b"", b"")


@pytest.mark.parametrize(("word", "expected"), [("rnak", " (did you mean rank?)"), ("zzz", ""), ("", "")])
def test_a_near_match_is_named_and_a_far_one_is_not(word, expected):
    assert suggest(word, iter(["rank", "alpha"])) == expected


def test_of_many_names_the_first_are_said_and_how_many_more_there_are():
    assert (some("abc", 3), some(iter("abc"), 2), some([], 2)) == ("a, b, c", "a, b and 1 more", "")


def test_of_a_long_message_the_first_or_last_line_that_says_anything_is_taken():
    error = ValueError("\n   no such file  \n\nat line 3\n \n")
    assert (first_line(error), last_line(error)) == ("no such file", "at line 3")
    assert len(first_line(ValueError("x" * 1000))) == 200


def test_an_error_that_says_nothing_is_called_by_its_type_or_as_told():
    assert (first_line(KeyError()), last_line(KeyError())) == ("KeyError", "KeyError")
    assert first_line(" \n ", otherwise="no reason given") == "no reason given"


@each("number", USERS_ERRNOS)
def test_what_a_disk_refuses_is_one_line_with_the_place_and_a_remedy(number):
    full, failing = number in (errno.ENOSPC, errno.EDQUOT), number in USERS_ERRNOS[-6:]
    text = explain_os_error(OSError(number, "said by the system", "/there/file"))
    assert "(/there/file); " in text and "\n" not in text
    assert text.startswith("no space left on the disk") == full
    assert ("free some" in text, "name another place" in text) == (full, not full and not failing)
    assert ("what is complete was kept" in text) == (full or failing)
    assert "(" not in explain_os_error(OSError(number, "said by the system"))
