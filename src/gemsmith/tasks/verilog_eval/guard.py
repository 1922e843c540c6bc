"""Whether a module under test keeps to itself: it prints nothing, ends nothing, and names nothing of its testbench.

The verdict is a line that the testbench prints. It can be trusted where the tested module cannot print, cannot reach
into the testbench and cannot end the simulation, which is decided here, on the preprocessed text (so no macro hides
anything), token by token. What is returned is written from those tokens, so that the compiler reads what was checked.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<open>/\*)
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<directive>`\w+)
  | (?P<system>\$[A-Za-z_][\w$]*)
  | (?P<escaped>\\\S+)
  | (?P<name>[A-Za-z_][\w$]*)
  | (?P<number>\d[\w]*(?:\.\d[\w]*)?)
  | (?P<other>.)
    """,
    re.ASCII | re.DOTALL | re.VERBOSE,
)
_SILENT = {
    "signed", "unsigned", "clog2", "bits", "countones", "onehot", "onehot0", "isunknown", "size", "left", "right",
    "high", "low", "increment", "dimensions", "unpacked_dimensions", "typename", "cast", "pow", "sqrt", "ceil", "floor",
    "ln", "log10", "exp", "abs", "min", "max", "rtoi", "itor", "realtobits", "bitstoreal", "random", "urandom",
    "urandom_range", "time", "stime", "realtime", "timeformat", "dumpfile", "dumpvars", "dumpon", "dumpoff", "dumpall",
    "dumpflush", "dumplimit",
}  # fmt: skip
_PRINTS = re.compile(r"\$(?:(?:display|write|strobe|monitor)[bho]?|error|warning|info)$")
_KEYWORDS = {"bind", "defparam", "force", "release"}
"""What changes other modules."""
_DIRECTIVES = {
    "timescale", "default_nettype", "resetall", "celldefine", "endcelldefine", "line", "begin_keywords", "end_keywords",
    "unconnected_drive", "nounconnected_drive",
}  # fmt: skip
"""What the preprocessor leaves for the compiler; with another, the compiler's own preprocessor would make other text of
what was checked.
"""


class Forged(Exception):  # noqa: N818 - a verdict, not a fault
    """The module reaches beyond itself; the message says how."""


class _Token(NamedTuple):
    kind: str
    text: str

    @property
    def name(self) -> str:
        """An identifier's, however it is written; else nothing."""
        return self.text.removeprefix("\\") if self.kind in ("name", "escaped") else ""


def scope_names(testbench: str, reference: str) -> tuple[set[str], set[str]]:
    """The modules that a testbench and a reference define, and every name that may be a scope of the testbench."""
    modules = set(re.findall(r"\bmodule\s+(\w+)", f"{testbench}\n{reference}"))
    blocks = re.findall(r"\b(?:begin|fork)\s*:\s*(\w+)", testbench)
    routines = re.findall(r"\b(?:task|function)\b[^;(]*?(\w+)\s*[;(]", testbench)
    return modules, {*modules, *blocks, *routines, *re.findall(r"(\w+)\s*\(", testbench)}


def guard(source: str, *, modules: set[str], scopes: set[str]) -> str:
    """The source with its printing silenced. Raises Forged where it is not a module for itself.

    `source` is preprocessed; `modules` and `scopes`: see scope_names.
    """
    tokens = [token for token in _tokens(source) if token.kind != "comment"]
    solid = [token for token in tokens if token.kind != "space"]
    openings = _match_brackets(solid)
    roots: dict[int, str] = {}
    for place, token in enumerate(solid):
        _check(token, modules)
        if token.text == "." and place and _is_access(solid, place):
            root = _root(solid, place, openings, roots)
            if root is None or root in scopes:
                raise Forged(f"it reaches into the testbench through {root or 'an expression'}")
            roots[place] = root
    return "".join(_silenced(tokens))


def _tokens(source: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(source):
        kind = str(match.lastgroup)
        if match[0] in ('"', "`", "\\", "/*") or (
            not match[0].isprintable() and kind not in ("space", "comment", "string")
        ):
            raise Forged(f"it holds {match[0]!r}, with which its text could be read in two ways")
        yield _Token(kind, match[0] if kind != "comment" else " ")


def _check(token: _Token, modules: set[str]) -> None:
    if token.name in modules:
        raise Forged(f"it names {token.name}, a module of the testbench or the reference")
    if token.kind == "name" and token.text in _KEYWORDS:
        raise Forged(f"it uses {token.text}, which changes other modules")
    if token.name.startswith("$"):  # Icarus takes \$finish for $finish
        raise Forged(f"it uses {token.text}, an escaped name of a system task")
    if token.kind == "directive" and token.text[1:] not in _DIRECTIVES:
        raise Forged(f"it uses {token.text}, which is still there after the preprocessor")
    if token.kind == "system" and token.text[1:] not in _SILENT and not _PRINTS.match(token.text):
        raise Forged(f"it uses {token.text}, which a module under test has no need of")


def _is_access(tokens: Sequence[_Token], place: int) -> bool:
    """Whether the point is between a name and a part of it, and not in front of a port."""
    before = tokens[place - 1]
    return bool(before.name) or before.text in ("]", ")")


def _root(tokens: Sequence[_Token], place: int, openings: Mapping[int, int], roots: Mapping[int, str]) -> str | None:
    """The first name of the path that goes on at this point; None where it does not begin with one.

    `roots` are those of the points before, so that a path of a million points is not walked a million times.
    """
    at = place - 1
    while at >= 0 and tokens[at].text == "]":
        at = openings.get(at, 0) - 1
    if at < 0 or not tokens[at].name:
        return None
    return roots.get(at - 1, tokens[at].name)


def _match_brackets(tokens: Sequence[_Token]) -> dict[int, int]:
    """Where each bracket that is closed was opened."""
    opened: list[int] = []
    found: dict[int, int] = {}
    for at, token in enumerate(tokens):
        if token.text == "[":
            opened.append(at)
        elif token.text == "]" and opened:
            found[at] = opened.pop()
    return found


def _silenced(tokens: Sequence[_Token]) -> Iterator[str]:
    """The text again, with what prints made to print to no channel: $display("x") becomes $fdisplay(0, "x")."""
    muted = opened = False
    for token in tokens:
        if token.kind == "system" and _PRINTS.match(token.text):
            yield "$fdisplay"
            muted = True
        elif token.kind == "space" or not (muted or opened):
            yield token.text
        elif opened:
            yield token.text if token.text == ")" else f", {token.text}"
            opened = False
        else:
            muted, opened = False, token.text == "("
            yield "(0" if opened else f"(0){token.text}"
