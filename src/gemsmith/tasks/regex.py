r"""The scorer `regex`: an answer is right where a pattern is found in it.

`pattern` is a column of the row, or one for all rows in `eval.options`. It is searched for anywhere in the answer;
`\A` and `\Z` tie it to the ends, `(?i)` ignores case. Where it has groups, what they hold in the answer must also be
what they hold in the expected answer: `The answer is (\d+)`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemsmith.errors import DataError, ScorerError
from gemsmith.system.patterns import compile_pattern, search
from gemsmith.tasks.base import Question, Verdict

if TYPE_CHECKING:
    import regex

COLUMNS = ("pattern",)
_SHOWN = 60


def check(question: Question) -> None:
    """Raises DataError where the pattern cannot be used, or its groups are not found in the expected answer."""
    pattern = _compile(question)
    if not pattern.groups:
        return
    try:
        found = _search(pattern, question.expected)
    except ScorerError as error:
        raise DataError(f"{question.origin}: {error} on the expected answer; write it without nested repeats") from None
    if found is None:
        why = f"pattern {question.columns['pattern']!r} has groups to compare, and is not found in the expected answer"
        raise DataError(f"{question.origin}: {why}; change one of them")


def score(question: Question, answers: Sequence[str]) -> list[Verdict]:
    """A verdict for each answer. Raises ScorerError where the pattern takes too long on one."""
    pattern = _compile(question)
    expected = _search(pattern, question.expected) if pattern.groups else None
    verdicts = []
    for answer in answers:
        found = _search(pattern, answer)
        if found is None:
            verdicts.append(Verdict(right=False, reason="pattern not found"))
        elif expected is None or found == expected:
            verdicts.append(Verdict(right=True))
        else:
            one, other = next((one, other) for one, other in zip(found, expected, strict=True) if one != other)
            verdicts.append(Verdict(right=False, reason=f"{_shown(one)} instead of {_shown(other)}"))
    return verdicts


def _search(pattern: "regex.Pattern[str]", text: str) -> tuple[str | None, ...] | None:
    """What the groups of the first match hold; None where there is none."""
    try:
        match = search(pattern, text)
    except ValueError:
        raise ScorerError("pattern too slow") from None
    return match.groups() if match else None


def _compile(question: Question) -> "regex.Pattern[str]":
    pattern = question.columns["pattern"]
    if not isinstance(pattern, str):
        raise DataError(f"{question.origin}: pattern is {pattern!r}; give a regular expression, as text")
    try:
        return compile_pattern(pattern)
    except ValueError as error:
        raise DataError(f"{question.origin}: pattern {pattern!r} is no regular expression ({error})") from None


def _shown(text: str | None) -> str:
    return repr(text if text is None or len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
