"""The Verilog in a model's answer: fenced or not, with prose around it, in several modules or versions."""

import re
from collections.abc import Iterator

TOP = "TopModule"
_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE)
_TAGGED = re.compile(r"\[BEGIN\](.*?)(?:\[DONE\]|\Z)", re.DOTALL)
# Not one expression from a module to its end: of a thousand modules without one each would be read to the end of all.
_EDGE = re.compile(r"^[ \t]*(?P<begin>(?:\(\*[^\n]*?\*\)\s*)?(?:macro)?module\b)|\bendmodule\b", re.MULTILINE)
_NAME = re.compile(r"module\s+(?:automatic\s+|static\s+)?(\\\S+|\w+)")
_DIRECTIVE = re.compile(r"^[ \t]*`(?:define|undef|ifdef|ifndef|else|elsif|endif|timescale|default_nettype)\b.*$", re.M)


def extract_modules(answer: str) -> str | None:
    r"""The source text of the modules that an answer ends up with, or None where it has no TopModule.

    Of several blocks the last one that has a TopModule counts, and modules of other blocks that it lacks; what is
    around the modules is dropped, but for directives in front of them.

    >>> extract_modules("Sure:\n```verilog\nmodule TopModule(output y);\nendmodule\n```\nDone.")
    'module TopModule(output y);\nendmodule\n'
    """
    blocks = [match[2] for match in _FENCE.finditer(answer)] or [match[1] for match in _TAGGED.finditer(answer)]
    found = [_modules(block) for block in blocks or [answer]]
    if not any(TOP in modules for modules in found):
        found = [_modules(answer)]
    last = next((place for place in reversed(range(len(found))) if TOP in found[place]), None)
    if last is None:
        return None
    others = {name: text for modules in found for name, text in modules.items() if name not in found[last]}
    return "\n".join([*others.values(), *found[last].values()]) + "\n"


def _modules(block: str) -> dict[str, str]:
    """Modules by name, each with the directives between it and the one before; of two of one name the last."""
    modules: dict[str, str] = {}
    end = 0
    for start, stop in _spans(block):
        text = block[start:stop]
        if named := _NAME.search(text):
            before = [line[0] for line in _DIRECTIVE.finditer(block, end, start)]
            modules[named[1].removeprefix("\\")] = "\n".join([*before, text])
        end = stop
    return modules


def _spans(block: str) -> Iterator[tuple[int, int]]:
    """From the first `module` after each `endmodule` to the next `endmodule`."""
    start = None
    for edge in _EDGE.finditer(block):
        if edge["begin"]:
            start = edge.start("begin") if start is None else start
        elif start is not None:
            yield start, edge.end()
            start = None
