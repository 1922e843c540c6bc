"""Regular expressions of strangers, bounded in time and memory.

`re` has no limit on the time of a match: `(.*)*(.*)*x` takes for ever. `regex` has one, but writes counted repeats out
when it compiles: `((a{1000}){1000}){1000}` takes all memory.
"""

import functools
import math
import re

import regex

TIMEOUT_S = 2.0
_MOST_REPEATED = 1_000_000


@functools.lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> "regex.Pattern[str]":
    """The pattern, for search and match. Raises ValueError of one line where it is none, or repeats too much."""
    groups, atoms = (re.findall(rf"{before}\{{\s*(\d{{1,18}})", pattern) for before in (r"\)\s*", r"[^)\s]\s*"))
    if math.prod(max(1, int(times)) for times in groups) * sum(map(int, atoms), len(pattern)) > _MOST_REPEATED:
        raise ValueError("its counted repeats are too many")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def search(pattern: "regex.Pattern[str]", text: str, *, whole: bool = False) -> "regex.Match[str] | None":
    """The first match, or that of the whole text. Raises ValueError where it takes longer than TIMEOUT_S."""
    try:
        return (pattern.fullmatch if whole else pattern.search)(text, timeout=TIMEOUT_S, concurrent=True)
    except TimeoutError:
        raise ValueError("takes too long; write it without nested repeats") from None
