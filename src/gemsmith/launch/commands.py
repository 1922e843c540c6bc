"""What gcloud, kubectl and sky are asked for a launch, by commands.yaml, and what is wrong with their answers."""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import resources as package_files
from string import Formatter
from typing import Any

import yaml

from gemsmith.errors import InputError
from gemsmith.launch.provider import (
    WORD,
    ChosenOptions,
    Command,
    LaunchRecord,
    LaunchRequest,
    PreflightCheck,
    Resource,
    Target,
)

_QUOTA = re.compile(r"RtxPro6000.*NoZonalRedundancy")
"""In the name of the quota that Cloud Run's rendered job draws on."""
_Values = Mapping[str, Any]


@cache
def _table() -> dict[str, Any]:
    text = package_files.files("gemsmith.launch").joinpath("commands.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    return table


def fill(command: str, values: _Values) -> Command:
    """The words of a command, with the values put into them.

    Raises InputError for one that bash would take for more than a word: a launch's record may come from anywhere.

    >>> fill("ls {folder}/x", {"folder": "a b"})
    ('ls', 'a b/x')
    """
    words = shlex.split(command)
    if words[0] == "bash":
        names = [name for _, name, *_ in Formatter().parse(words[-1]) if name]
        if odd := next((name for name in names if not WORD.fullmatch(str(values[name]))), None):
            raise InputError(f"{odd} {values[odd]!r}: must be letters, digits and . : / @ - _ alone")
    return tuple(word.format_map(values) for word in words)


def values_of(options: ChosenOptions) -> dict[str, Any]:
    """The options, and what follows from them for a command."""
    place = options.zone or options.region
    return dict(options) | {
        "place": place,
        "level": "zone" if options.zone else "region",
        # The name that gcloud gives it; so whichever is the current one does not matter.
        "context": f"gke_{options.project}_{place}_{options.cluster}",
    }


def follow_command(record: LaunchRecord, verb: str) -> Command:
    """The command that prints the `status` of a launch, or its `logs`."""
    return fill(_table()[record.target][verb], values_of(record))


def resources(record: LaunchRecord, verb: str) -> tuple[Resource, ...]:
    """What `stop` removes: all that costs money while it is there (`running`); or what `clean` removes (`created`)."""
    provider, values = _table()[record.target], values_of(record)
    entries = provider["running"] + (provider.get("created", []) if verb == "created" else [])
    return tuple(
        Resource(kind=entry["kind"], list=fill(entry["list"], values), remove=fill(entry["remove"], values))
        for entry in entries
    )


def preflight(request: LaunchRequest, provider: str, target: Target) -> list[PreflightCheck]:
    """What must be there before anything is created."""
    options, image, weights = request.options, str(request.image.value), request.inputs.weights_bucket
    more, in_registry = target.values(request), in_artifact_registry(image) and options.wheel is None
    given = request.image.reason == "--image"
    values = values_of(options) | {
        "apis": f"{more['api']} storage.googleapis.com",
        "run_bucket": f"gs://{request.bucket}",
        "weights": f"gs://{weights}" if weights not in (None, request.bucket) else None,
        "image": image,
        "public_image": options.wheel is None and not in_registry,
        "own_image": in_registry and given,
        "built_image": in_registry and not given,
        "pulled_by_account": in_registry and more.get("account_pulls", True),
        "stack": image.rpartition("/")[2].partition(":")[0],
        "account_name": options.service_account.partition("@")[0],
        "member": f"serviceAccount:{options.service_account}",
        **more,
    }
    checks = []
    for entry in _table()["preflight"]:
        if provider in entry.get("providers", (provider,)) and values.get(entry.get("when", "name")):
            own = {key: entry[key].format_map(values) for key in ("role", "member", "if_empty") if key in entry}
            known = values | own
            check = PreflightCheck(
                name=entry["name"].format_map(known),
                command=fill(entry["command"], known),
                remedy=entry["remedy"].format_map(known),
                complaint=partial(COMPLAINTS[entry.get("complaint", "empty")], known),
                needed=entry.get("needed", True),
            )
            checks.append(check)
    return checks


def _empty(values: _Values, output: str) -> str | None:
    return None if output.strip() else values.get("if_empty")


def _not_enabled(values: _Values, output: str) -> str | None:
    names = [name for name in values["apis"].split() if name not in output.split()]
    return f"not enabled: {', '.join(names)}" if names else None


def _far_away(values: _Values, output: str) -> str | None:
    """Unless reads from there stay in the region, or in the multi-region that holds it.

    >>> _far_away({"region": "us-central1"}, "US"), _far_away({"region": "europe-west4"}, "US")
    (None, 'it is in us')
    """
    location, region = output.strip().lower(), values["region"]
    holds = {"us": "us-", "eu": "europe-", "asia": "asia-"}.get(location, "-")
    return None if location == region or region.startswith(holds) else f"it is in {location}"


def _without_role(values: _Values, output: str) -> str | None:
    member = values["member"]
    try:
        bindings = json.loads(output or "{}").get("bindings", [])
    except (ValueError, AttributeError):
        return "its policy cannot be read"
    has = any(entry.get("role") == values["role"] and member in entry.get("members", ()) for entry in bindings)
    return None if has else f"{member.partition(':')[2]} does not have it"


def _not_of_account(values: _Values, output: str) -> str | None:
    """Pods on their host's network are what their node is."""
    return None if values["service_account"] in re.split(r"[;\s]+", output) else "none of its node pools does"


def _another_account(values: _Values, output: str) -> str | None:
    return None if (found := output.strip()) == values["service_account"] else f"it is {found or 'nobody'} there"


def _without_quota(values: _Values, output: str) -> str | None:
    """Why a task gets no GPU, by all quotas of Cloud Run, which are listed whatever their value in a region is."""
    try:
        quotas = [quota for quota in json.loads(output) if _QUOTA.search(quota["quotaId"])]
        infos = [info for quota in quotas for info in quota.get("dimensionsInfos", ())]
        here = [info.get("details", {}) for info in infos if values["region"] in info["applicableLocations"]]
        found = [int(details.get("value", 0)) for details in here]  # 0 is left out, -1 is no limit
    except (ValueError, KeyError, TypeError, AttributeError):
        return "the quotas cannot be read"
    return None if any(found) else "it is 0" if found else "none is listed for this GPU"


def _taken(values: _Values, output: str) -> str | None:
    """The command prints names, kubectl with the kind and a slash."""
    name = values["name"]
    return f"there is {name}" if name in (word.rpartition("/")[2] for word in output.split()) else None


def _smaller_than_26(_values: _Values, output: str) -> str | None:
    """Direct VPC takes a /26 or larger."""
    bits = output.strip().rpartition("/")[2]
    return None if bits.isdecimal() and int(bits) <= 26 else f"it is {output.strip() or 'not there'}"


COMPLAINTS: dict[str, Callable[[_Values, str], str | None]] = {
    "empty": _empty,
    "not enabled": _not_enabled,
    "far away": _far_away,
    "without role": _without_role,
    "not of account": _not_of_account,
    "another account": _another_account,
    "without quota": _without_quota,
    "taken": _taken,
    "smaller than 26": _smaller_than_26,
}
"""What is wrong with an output, None where nothing is, by the name that commands.yaml has for it."""


def registry_of(image: str) -> str:
    """The host that an image is pulled from.

    >>> registry_of("ghcr.io/me/gemsmith:1"), registry_of("me/gemsmith"), registry_of("localhost:5000/me")
    ('ghcr.io', 'docker.io', 'localhost:5000')
    """
    host, slash, _ = image.partition("/")
    return host if slash and ("." in host or ":" in host) else "docker.io"


def in_artifact_registry(image: str) -> bool:
    """Whether the image is in Artifact Registry, which asks who pulls."""
    return registry_of(image).endswith(("-docker.pkg.dev", "gcr.io"))
