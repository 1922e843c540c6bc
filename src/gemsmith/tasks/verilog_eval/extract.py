"""The Verilog in a model's answer: fenced or not, with prose around it, in several modules or versions."""

import re

TOP = "TopModule"
_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE)
_TAGGED = re.compile(r"\[BEGIN\](.*?)(?:\[DONE\]|\Z)", re.DOTALL)
_MODULE = re.compile(r"^[ \t]*(?:(?:\(\*.*?\*\)\s*)?(?:macro)?module)\b.*?\bendmodule\b", re.DOTALL | re.MULTILINE)
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
    for match in _MODULE.finditer(block):
        named = _NAME.search(match[0])
        if named:
            before = [line[0] for line in _DIRECTIVE.finditer(block, end, match.start())]
            modules[named[1].removeprefix("\\")] = "\n".join([*before, match[0].lstrip()])
        end = match.end()
    return modules
