"""Files to submit, in which every value that was chosen has its reason behind it, from templates beside the providers.

A template's `{{ value }}` is one scalar of YAML or one word of a shell, whatever is in it, so that nothing that a user
or a catalog says is taken for more; a WithReason has its reason in a comment behind it.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import yaml

from gemsmith.launch.provider import Command, LaunchRequest, WithReason
from gemsmith.launch.upload import cost_lines, upload_steps
from gemsmith.system.characters import one_line, yaml_line

_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")


def render_files(
    request: LaunchRequest, files: Mapping[str, str], submit: Iterable[tuple[str, Command]]
) -> dict[str, str]:
    """All files of a launch: the recipe, those of its target, and submit.sh, which uploads before it submits."""
    commands = render_commands([*upload_steps(request), *submit], heading=cost_lines(request))
    return {"recipe.yaml": request.recipe_text, **files, "submit.sh": commands}


def render_template(name: str, request: LaunchRequest, *, heading: Iterable[str] | None = None, **values: Any) -> str:
    """A template of YAML, or of bash (.sh), filled in with the request, its options and the values.

    The heading, by default what the launch can cost, stands above it as comments.
    """
    # Here, since commands that only ask after a launch do without it.
    import jinja2

    is_shell = name.endswith(".sh")
    environment = jinja2.Environment(  # noqa: S701 - each value is escaped
        undefined=jinja2.StrictUndefined,
        finalize=shell_word if is_shell else yaml_scalar,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["because"] = WithReason
    source = resources.files("gemsmith.launch.providers").joinpath(f"{name}.jinja").read_text(encoding="utf-8")
    filled = environment.from_string(source).render(request=request, options=request.options, **values)
    above = comments(cost_lines(request) if heading is None else heading)
    return "\n".join([*(["#!/usr/bin/env bash"] if is_shell else []), *above, filled])


def render_commands(steps: Iterable[tuple[str, Command]], *, heading: Iterable[str] = ()) -> str:
    """A bash script that runs the commands in order and stops at the first that fails; each has its reason above it."""
    lines = ["#!/usr/bin/env bash", *comments(heading), "set -euo pipefail", 'cd "$(dirname "$0")"']
    for reason, command in steps:
        lines += [*([""] if reason else []), *comments(reason.split("\n") if reason else ()), shlex.join(command)]
    return "\n".join(lines) + "\n"


def comments(lines: Iterable[str]) -> list[str]:
    """Each as one comment of YAML or a shell, whatever is in it."""
    return [f"# {one_line(line)}" for line in lines]


def yaml_scalar(value: Any) -> str:
    """The value as YAML reads it back; a word that YAML reads as itself needs no quotes.

    >>> yaml_scalar("Job"), yaml_scalar("20"), yaml_scalar("yes"), yaml_scalar(WithReason(3, "as asked"))
    ('Job', '"20"', '"yes"', '3  # as asked')
    """
    if isinstance(value, WithReason):
        return f"{yaml_scalar(value.value)}  # {one_line(value.reason)}"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return yaml_line(value)


def shell_word(value: Any) -> str:
    """The value as one word of a shell."""
    if isinstance(value, WithReason):
        return f"{shell_word(value.value)}  # {one_line(value.reason)}"
    word = shlex.quote(str(value))
    # A comma without quotes looks like a mistake in a list of bash.
    return f"'{word}'" if "," in word and not word.startswith("'") else word
