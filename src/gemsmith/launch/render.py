"""YAML and shell scripts in which every value that was chosen has its reason behind it."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from gemsmith.launch.provider import Command, WithReason
from gemsmith.system.characters import one_line, yaml_line

_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")


def render_yaml(value: Mapping[str, Any], *, heading: Iterable[str] = ()) -> str:
    """The value as YAML; each Chosen in it is its value, its reason a comment behind it.

    >>> print(render_yaml({"limits": {"cpu": Chosen("20", "the least")}, "args": ["a b"]}), end="")
    limits:
      cpu: "20"  # the least
    args:
    - "a b"
    """
    return "\n".join([*comments(heading), *_lines(value, "")]) + "\n"


def render_script(steps: Iterable[tuple[str, Command]], *, heading: Iterable[str] = ()) -> str:
    """A bash script that runs the commands in order and stops at the first that fails; each has its reason above it."""
    lines = ["#!/usr/bin/env bash", *comments(heading), "set -euo pipefail", 'cd "$(dirname "$0")"']
    for reason, command in steps:
        lines += [*([""] if reason else []), *comments(reason.split("\n") if reason else ()), shlex.join(command)]
    return "\n".join(lines) + "\n"


def comments(lines: Iterable[str]) -> list[str]:
    """Each as one comment of YAML or a shell, whatever is in it."""
    return [f"# {one_line(line)}" for line in lines]


def _lines(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{indent}{_scalar(key)}:", item, indent)
        return
    for item in value:
        if isinstance(item, Mapping) and item:
            first, *rest = _lines(item, indent + "  ")
            yield f"{indent}- {first.removeprefix(indent + '  ')}"
            yield from rest
        else:
            yield from _entry(f"{indent}-", item, indent)


def _entry(start: str, item: Any, indent: str) -> Iterator[str]:
    if isinstance(item, WithReason):
        yield f"{start} {_scalar(item.value)}  # {one_line(item.reason)}"
    elif isinstance(item, Mapping) and item:
        yield start
        yield from _lines(item, indent + "  ")
    elif isinstance(item, list | tuple) and item:
        yield start
        yield from _lines(item, indent)
    else:
        yield f"{start} {_scalar(item)}"


def _scalar(value: Any) -> str:
    """A word that YAML reads as itself needs no quotes."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return yaml_line(value)
