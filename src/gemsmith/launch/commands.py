"""What gcloud, kubectl and sky are asked for a launch, by commands.yaml, and what is wrong with their answers."""

import json
import re
import shlex
from collections.abc import Mapping
from functools import cache, partial
from importlib import resources as package_files
from string import Formatter
from typing import Any

import yaml

from gemsmith.errors import InputError
from gemsmith.launch.provider import WORD, ChosenOptions, Command, LaunchRecord, LaunchRequest, PreflightCheck, Resource

_QUOTA = re.compile(r"RtxPro6000.*NoZonalRedundancy")  # in the name of the quota that Cloud Run's rendered job draws on
_Values = Mapping[str, Any]


@cache
def _table() -> dict[str, Any]:
    return yaml.safe_load(package_files.files("gemsmith.launch").joinpath("commands.yaml").read_text(encoding="utf-8"))


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
        "scales": (options.max_replicas or 1) > 1,
    }


def steps_of(provider: str, verb: str, values: _Values) -> list[tuple[str, Command]]:
    """Reason and command of each step that submits a launch (`submit`), or its service (`serve`); and of `upload`."""
    return [
        (
            "\n".join(_given(step["why"], values)).format_map(values),
            fill(" ".join(_given(step["command"], values)), values),
        )
        for step in _table()[provider][verb]
    ]


def _given(parts: Any, values: _Values) -> list[str]:
    """A text, or those of a list; of a mapping those whose value is given or true."""
    parts = parts if isinstance(parts, list) else [parts]
    named = [pair for part in parts for pair in (part.items() if isinstance(part, dict) else [(None, part)])]
    return [text for name, text in named if name is None or values.get(name)]


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
        if values.get(entry.get("when", "name"))
    )


def leftover_resources(record: LaunchRecord) -> list[str]:
    """What clean leaves, with the command that removes it."""
    in_registry = record.image is not None and in_artifact_registry(record.image)
    values = values_of(record) | {"in_registry": in_registry, "elsewhere": record.image and not in_registry}
    return [f"kept: {text.format_map(values)}" for text in _given(_table()["kept"], values)]


def preflight(request: LaunchRequest, provider: str, of_target: _Values) -> list[PreflightCheck]:
    """What must be there before anything is created. `of_target`: Target.values of the request."""
    options, image, weights = request.options, str(request.image.value), request.inputs.weights_bucket
    in_registry, given = in_artifact_registry(image) and options.wheel is None, request.image.reason == "--image"
    values = values_of(options) | {
        "apis": f"{of_target['api']} storage.googleapis.com",
        "run_bucket": f"gs://{request.bucket}",
        "weights": f"gs://{weights}" if weights not in (None, request.bucket) else None,
        "image": image,
        "public_image": options.wheel is None and not in_registry,
        "own_image": in_registry and given,
        "built_image": in_registry and not given,
        "pulled_by_account": in_registry and of_target.get("account_pulls", True),
        "streams": options.load == "stream",
        "stack": image.rpartition("/")[2].partition(":")[0],
        "account_name": options.service_account.partition("@")[0],
        "member": f"serviceAccount:{options.service_account}",
        **of_target,
    }
    checks = []
    for entry in _table()["preflight"]:
        if provider in entry.get("providers", (provider,)) and values.get(entry.get("when", "name")):
            own = {key: entry[key].format_map(values) for key in ("role", "member", "if_empty") if key in entry}
            known = values | own
            checks.append(
                PreflightCheck(
                    name=entry["name"].format_map(known),
                    command=fill(entry["command"], known),
                    remedy=entry["remedy"].format_map(known),
                    complaint=partial(find_complaint, entry.get("complaint", "empty"), known),
                    needed=entry.get("needed", True),
                )
            )
    return checks


def find_complaint(kind: str, values: _Values, output: str) -> str | None:
    """What is wrong with a command's output, None where nothing is; commands.yaml names the kind of check.

    >>> [find_complaint("far away", {"region": region}, "US") for region in ("us-central1", "europe-west4")]
    [None, 'it is in us']
    """
    found = output.strip()
    match kind:
        case "without role":
            return _without_role(values["role"], values["member"], output)
        case "without quota":
            return _without_quota(values["region"], output)
        case "empty":
            wrong, said = not found, values.get("if_empty")
        case "not enabled":
            names = [name for name in values["apis"].split() if name not in found.split()]
            wrong, said = bool(names), f"not enabled: {', '.join(names)}"
        case "far away":  # unless reads from there stay in the region, or in the multi-region that holds it
            location, region = found.lower(), values["region"]
            holds = {"us": "us-", "eu": "europe-", "asia": "asia-"}.get(location, "-")
            wrong, said = location != region and not region.startswith(holds), f"it is in {location}"
        case "not of account":  # pods on their host's network are what their node is
            wrong, said = values["service_account"] not in re.split(r"[;\s]+", output), "none of its node pools does"
        case "another account":
            wrong, said = found != values["service_account"], f"it is {found or 'nobody'} there"
        case "taken":  # the command prints names, kubectl with the kind and a slash
            names = [word.rpartition("/")[2] for word in found.split()]
            wrong, said = values["name"] in names, f"there is {values['name']}"
        case "smaller than 26":  # Direct VPC takes a /26 or larger
            bits = found.rpartition("/")[2]
            wrong, said = not bits.isdecimal() or int(bits) > 26, f"it is {found or 'not there'}"
        case _:
            raise AssertionError(f"commands.yaml: complaint {kind}")
    return said if wrong else None


def _without_role(role: str, member: str, output: str) -> str | None:
    try:
        bindings = json.loads(output or "{}").get("bindings", [])
    except (ValueError, AttributeError):
        return "its policy cannot be read"
    has = any(entry.get("role") == role and member in entry.get("members", ()) for entry in bindings)
    return None if has else f"{member.partition(':')[2]} does not have it"


def _without_quota(region: str, output: str) -> str | None:
    """Why a task gets no GPU, by all quotas of Cloud Run, which are listed whatever their value in a region is."""
    try:
        quotas = [quota for quota in json.loads(output) if _QUOTA.search(quota["quotaId"])]
        infos = [info for quota in quotas for info in quota.get("dimensionsInfos", ())]
        here = [info.get("details", {}) for info in infos if region in info["applicableLocations"]]
        found = [int(details.get("value", 0)) for details in here]  # 0 is left out, -1 is no limit
    except (ValueError, KeyError, TypeError, AttributeError):
        return "the quotas cannot be read"
    return None if any(found) else "it is 0" if found else "none is listed for this GPU"


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
