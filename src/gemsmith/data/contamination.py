"""Rows that share a specification or a module with a benchmark's problems: exactly, or nearly, by normalised tokens.

Exact: the same tokens in the same order. Near: a row has at least a stated share of a problem's n-grams of tokens.
N-grams that many problems have (`I would like you to implement a module named TopModule`) say nothing and do not
count; a problem with few others is compared exactly alone.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

N = 8
"""Tokens in an n-gram."""
NEAR = {"specification": 0.5, "module": 0.8}
"""The share of a problem's n-grams from which on a row is near. Modules of one kind resemble each other more."""
_FEWEST = 8
_COMMON_SHARE, _COMMON_LEAST = 0.05, 3
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_WORDS = re.compile(r"\w+")
_CODE = re.compile(r"\w+|[^\w\s]")
_NAMED = re.compile(r"\bmodule\s+(\w+)")


@dataclass(frozen=True, kw_only=True)
class Match:
    """A problem that a text shares tokens with."""

    problem: str
    exact: bool
    share: float
    """Of the problem's n-grams that the text has; 1 where it is exact."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """The problems' texts of one kind, to be searched for."""

    kind: str
    exact: Mapping[tuple[str, ...], str]
    grams: Mapping[tuple[str, ...], tuple[str, ...]]
    """An n-gram -> the problems that have it."""
    sizes: Mapping[str, int]
    """How many n-grams of a problem count."""


def build_index(kind: str, texts: Mapping[str, str]) -> Index:
    """The index of texts by their problems' names; `kind` is specification or module."""
    tokens = {name: normalise(kind, text) for name, text in texts.items()}
    owned = {name: set(_grams(each)) for name, each in tokens.items()}
    counts = Counter(gram for grams in owned.values() for gram in grams)
    most = max(_COMMON_LEAST, _COMMON_SHARE * len(texts))
    telling = {name: {gram for gram in grams if counts[gram] <= most} for name, grams in owned.items()}
    telling = {name: grams for name, grams in telling.items() if len(grams) >= _FEWEST}
    owners: dict[tuple[str, ...], list[str]] = {}
    for name, grams in telling.items():
        for gram in grams:
            owners.setdefault(gram, []).append(name)
    return Index(
        kind=kind,
        exact={each: name for name, each in reversed(tokens.items())},
        grams={gram: tuple(names) for gram, names in owners.items()},
        sizes={name: len(grams) for name, grams in telling.items()},
    )


def find_match(index: Index, text: str) -> Match | None:
    """The problem that a text is most like, where it is the same or near; of equals the first by name."""
    tokens = normalise(index.kind, text)
    if tokens in index.exact:
        return Match(problem=index.exact[tokens], exact=True, share=1.0)
    grams = index.grams
    hits = Counter(name for gram in set(_grams(tokens)) if gram in grams for name in grams[gram])
    shares = {name: count / index.sizes[name] for name, count in hits.items()}
    name = min(shares, key=lambda name: (-shares[name], name), default=None)
    if name is None or shares[name] < NEAR[index.kind]:
        return None
    return Match(problem=name, exact=False, share=round(shares[name], 4))


def normalise(kind: str, text: str) -> tuple[str, ...]:
    """The tokens that are compared: a specification's words in small letters, a module's code without comments.

    >>> normalise("module", "module And2 (input a); // gate")
    ('module', 'TOP', '(', 'input', 'a', ')', ';')
    """
    if kind == "specification":
        return tuple(_WORDS.findall(text.lower()))
    code = _COMMENT.sub(" ", text)
    tops = _NAMED.findall(code)
    # The module's own name is all that tells a copy made for another benchmark from the original.
    names = {tops[-1]: "TOP"} if tops else {}
    return tuple(names.get(token, token) for token in _CODE.findall(code))


def _grams(tokens: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(tokens[place:] for place in range(N)), strict=False)
