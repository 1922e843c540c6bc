"""Files to submit, in which every value that was chosen has its reason behind it, from templates beside the providers.

A service's are among them: what vLLM is told there is what `gemsmith serve --machine` would tell it on such a machine.
A template's `{{ value }}` is one scalar of YAML or one word of a shell, whatever is in it, so that nothing that a user
or a catalog says is taken for more; a WithReason has its reason in a comment behind it. In a comment stands
`{{ value | comment }}`.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any, NamedTuple, Self

import yaml

from gemsmith.arch import Variant
from gemsmith.hardware import Machine
from gemsmith.launch.commands import steps_of, values_of
from gemsmith.launch.provider import MOUNT, Command, LaunchRequest, WithReason
from gemsmith.launch.upload import GB, cost_lines, upload_steps
from gemsmith.plan.serving import cold_start_s, describe_cold_start
from gemsmith.recipe.schema import Recipe
from gemsmith.serve.command import PORT, PROMPT_AND_OUTPUT, Weights, deploy, published_config
from gemsmith.serve.container import Deployment
from gemsmith.serve.settings import settings_of
from gemsmith.system.characters import one_line, yaml_line

_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")
_COMPILED = "/mnt/compiled"


def render_files(
    request: LaunchRequest, provider: str, values: dict[str, Any], own: Mapping[str, str], service: str | None = None
) -> dict[str, str]:
    """All files of a launch: its target's `own`, and a service's, are among them. `values`: Target.values."""
    known = values_of(request.options) | values
    steps = [*upload_steps(request), *steps_of(provider, "submit", known)]
    files = {"recipe.yaml": request.recipe_text, **own, "submit.sh": render_commands(steps, cost_lines(request))}
    if service is not None:
        files |= {"service.yaml": service, "serve.sh": render_commands(steps_of(provider, "serve", known))}
    return files | {images.list_file: images.list_text for images in request.inputs.images}


def render_template(name: str, request: LaunchRequest, **values: Any) -> str:
    """A template of YAML, or of bash (.sh), filled in with the request, its options and the values."""
    # Here, since commands that only ask after a launch do without it.
    import jinja2

    write = shell_word if name.endswith(".sh") else yaml_scalar
    environment = jinja2.Environment(  # noqa: S701 - each value is escaped
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Comment) else write(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"because": WithReason, "comment": Comment}
    environment.globals["cost_lines"] = cost_lines
    source = resources.files("gemsmith.launch.providers").joinpath(f"{name}.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).render(request=request, options=request.options, **values)


def render_commands(steps: Iterable[tuple[str, Command]], heading: Iterable[str] = ()) -> str:
    """A bash script that runs the commands in order and stops at the first that fails; each has its reason above it."""
    above = [f"# {Comment(line)}" for line in heading]
    lines = ["#!/usr/bin/env bash", *above, "set -euo pipefail", 'cd "$(dirname "$0")"']
    for reason, command in steps:
        why = ["", *(f"# {Comment(line)}" for line in reason.split("\n"))] if reason else []
        lines += [*why, shlex.join(command)]
    return "\n".join(lines) + "\n"


class Comment(str):
    """The text as a part of one comment of YAML or a shell, whatever is in it."""

    def __new__(cls, text: object) -> Self:
        return super().__new__(cls, one_line(str(text)).replace("\u00a0", " "))


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


class Volume(NamedTuple):
    """What of the run's bucket a server sees as a folder."""

    name: str
    path: str
    read_only: WithReason
    options: str  # of gcsfuse


class Service(NamedTuple):
    """A server of the tuned model."""

    deployment: Deployment
    arguments: list[str | WithReason]
    volumes: list[Volume]
    weights_gb: float
    probes: int  # of 10 s each, until vLLM must be up
    cold_start: str


def make_service(request: LaunchRequest, machine: Machine) -> Service:
    """The server, on a machine, of the merged weights in the run's bucket, mounted or streamed out of it."""
    options, template = request.options, request.recipe.data.template
    in_bucket = request.root.removeprefix(f"gs://{request.bucket}/")
    streams, volumes = options.load == "stream", list[Volume]()
    folder = f"{MOUNT}/{in_bucket}"
    deployment = deploy_merged(
        request.recipe,
        request.variant,
        machine,
        f"{request.root if streams else folder}/run/merged",
        name=options.name,
        images=request.recipe.serve.images or bool(request.inputs.images),
        chat_template=f"{folder}/launched/{template}" if template else None,
        **({"max_model_len": request.max_model_len} if request.max_model_len else {}),
    )
    if not streams or template:
        read_only = WithReason(True, "weights are only read; results never go through a mount")
        volumes.append(Volume("weights", MOUNT, read_only, ""))
    if streams and machine.chip.kind == "gpu":
        kept = WithReason(False, "what torch.compile made is found by the next start")
        volumes.append(Volume("compiled", _COMPILED, kept, f"implicit-dirs,only-dir={in_bucket}/compiled"))
        deployment = replace(deployment, environment={**deployment.environment, "VLLM_CACHE_ROOT": _COMPILED})
    weights_gb = 2 * request.plan.parameters / GB
    start_s = cold_start_s(machine, request.variant, options.load or "mount")
    return Service(
        deployment=deployment,
        arguments=service_arguments(deployment),
        volumes=volumes,
        weights_gb=weights_gb,
        probes=-(-int(2 * weights_gb * 8 + 300) // 10),
        cold_start=f"A cold start is estimated to take {describe_cold_start(start_s)}",
    )


def deploy_merged(
    recipe: Recipe, variant: Variant, machine: Machine, source: str, *, name: str, **chosen: Any
) -> Deployment:
    """The server of merged weights in a folder or bucket, whom others ask; `chosen`: settings beside the recipe's."""
    # What eval and bench need is little for others to ask with, unless it is more than the default.
    length = recipe.serve.max_model_len if (recipe.serve.max_model_len or 0) > PROMPT_AND_OUTPUT else None
    of_service = {"host": "0.0.0.0", "port": PORT, "max_model_len": length, "chat_template": None}
    settings = settings_of(recipe, **of_service | {"prefix_caching": True} | chosen)
    weights = Weights(source=source, is_folder=True, variant=variant, config=published_config(variant))
    # Keyed, as whoever calls is asked for a key: by vLLM, or by Google before vLLM sees the call.
    return deploy(machine, weights, settings, name=name, keyed=True)


def service_arguments(deployment: Deployment) -> list[str | WithReason]:
    """Its arguments, ["a", "--b", "c", "--d"] as ["a", "--b=c", "--d"], with the reasons of those that were chosen."""
    there = {mount.inside: mount.host for mount in deployment.mounts}
    reasons = {choice.what.partition(" ")[0]: choice.why for choice in deployment.choices}
    reasons["--gpu-memory-utilization"] = reasons["memory"]
    left, found = [there.get(word, word) for word in deployment.arguments], list[str | WithReason]()
    while left:
        word = left.pop(0)
        if word.startswith("--") and "=" not in word and left and not left[0].startswith("--"):
            word = f"{word}={left.pop(0)}"
        option = word.partition("=")[0]
        found.append(WithReason(word, reasons[option]) if option in reasons else word)
    return found
