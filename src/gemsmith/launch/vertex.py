"""A run's merged weights in Vertex AI's Model Registry, with vLLM as their server: `gemsmith push --to vertex:…`.

Fields and limits: the types of google-cloud-aiplatform 2.7.0 (ModelContainerSpec), read 2026-11-26.
"""

import re
import time
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import httpx

from gemsmith.errors import InputError, MachineError, first_line
from gemsmith.hardware import find_machine, load_catalog
from gemsmith.launch.commands import in_artifact_registry
from gemsmith.launch.provider import LABEL, Command
from gemsmith.launch.render import deploy_merged
from gemsmith.launch.submit import ask, show
from gemsmith.report.push import model_card, refuse_unverified, repository
from gemsmith.runs.records import Part
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import Run, find_run
from gemsmith.serve.command import GPU_IMAGE
from gemsmith.system.version import __version__

API = "https://{}-aiplatform.googleapis.com/v1"
_DESTINATION = re.compile(r"vertex:([a-z][\w.:-]*)/([a-z]+-[a-z]+\d+)")
_POLL_S = 10.0


class Registration(Part):
    """All that is run and sent."""

    upload: Command | None  # None: the weights lie there
    url: str
    body: dict[str, Any]


def make_registration(
    run: Run, destination: str, *, machine: str, bucket: str | None, root: str | None, license_: str | None
) -> Registration:
    """That of the merged weights in a launch's `root`, or of those here. Raises InputError for what will not work."""
    found, recipe, name = _DESTINATION.fullmatch(destination), run.recipe, run.path.resolve().name
    project, region = found.groups() if found else (repository(destination), "")  # which raises
    place = root or bucket or ""
    if not place.startswith("gs://"):
        raise InputError("--bucket: must be gs://BUCKET or a folder in it, for the weights of a run that is here")
    artifacts = f"{place.rstrip('/')}/{'run' if root else name}/merged"
    if recipe.data.template is not None:
        raise InputError("data.template: a server of Vertex AI sees the weights alone; push to hub:OWNER/NAME instead")
    image = recipe.serve.container_image or GPU_IMAGE
    if not in_artifact_registry(image):
        raise InputError(
            f"serve.container_image: {image}: Vertex AI takes images of Artifact Registry alone; make a remote one"
            f" of Docker Hub: --set serve.container_image={region}-docker.pkg.dev/{project}/REPOSITORY/{image}"
        )
    server = find_machine(load_catalog(recipe.hardware.catalog), machine, "--machine")
    if server.chip.kind != "gpu":
        raise InputError(f"--machine {machine}: has no GPU; name one that has, such as 1xh100")
    deployment = deploy_merged(recipe, recipe_variant(recipe), server, artifacts, name=name)
    trained = replace(run, recipe=find_run(run.path))  # what --set says of the server makes no record stale
    card = model_card(trained, f"{project}/{name}", weights="merged", license=license_).split("---\n", 2)[2].strip()
    labels = {LABEL: name, "model": recipe.model or "", "gemsmith": __version__, "license": license_ or ""}
    model = {
        "displayName": name,
        "description": card.replace(f"serve {project}/{name}", f"serve {artifacts} --load-format runai_streamer"),
        "labels": {key: re.sub(r"[^a-z0-9_-]", "-", text.lower())[:63] for key, text in labels.items() if text},
        "artifactUri": artifacts,
        "containerSpec": {
            "imageUri": image,
            "command": ["vllm", *deployment.program],
            "args": list(deployment.arguments),
            "env": [{"name": key, "value": value} for key, value in deployment.environment.items()],
            "ports": [{"containerPort": deployment.port}],
            "predictRoute": "/v1/chat/completions",
            "healthRoute": "/health",
            "sharedMemorySizeMb": "16384",
            "deploymentTimeout": "7200s",  # the most
        },
    }
    # Exactly, since vLLM streams all that a folder has; what a copy that was cut short left is not sent again.
    exactly = ("--recursive", "--checksums-only", "--delete-unmatched-destination-objects")
    upload = None if root else ("gcloud", "storage", "rsync", *exactly, str(run.merged), artifacts)
    url = f"{API.format(region)}/projects/{project}/locations/{region}/models:upload"
    return Registration(upload=upload, url=url, body={"model": model})


def register(run: Run, asked: Registration, *, skip_verify_check: bool) -> str:
    """The resource name of the registered model. Raises RunError as refuse_unverified, MachineError as _request."""
    if not skip_verify_check:
        refuse_unverified(run, "merged", are_here=asked.upload is not None)
    if asked.upload is not None:
        show(asked.upload)
    # A model of that name is given another version, the newest first where several have it.
    listed = {"filter": f'displayName="{asked.body["model"]["displayName"]}"', "orderBy": "create_time desc"}
    there = _request("GET", f"{asked.url.removesuffix(':upload')}?{urlencode(listed)}").get("models", ())
    mine = [model["name"] for model in there if LABEL in model.get("labels", {})]
    operation = _request("POST", asked.url, asked.body | ({"parentModel": mine[0]} if mine else {}))
    while not operation.get("done"):
        time.sleep(_POLL_S)
        operation = _request("GET", f"{asked.url.partition('/projects/')[0]}/{operation['name']}")
    return str(operation["response"]["model"])


def _request(method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What Vertex AI answers whom gcloud is logged in as. Raises MachineError where it refuses or is not reached."""
    token = ask(("gcloud", "auth", "print-access-token"))
    if token.returncode:
        raise MachineError(f"gcloud auth print-access-token: {token.stderr}; log in with: gcloud auth login")
    headers = {"Authorization": f"Bearer {token.stdout.strip()}"}
    try:
        answer = dict(httpx.request(method, url, json=body, headers=headers, timeout=60).json())
    except (httpx.HTTPError, ValueError) as error:
        remedy = "look for the model before you try again"
        raise MachineError(f"{url}: gave no answer ({first_line(error)}); {remedy}") from None
    if refused := answer.get("error"):
        raise MachineError(f"{url}: Vertex AI refused: {refused.get('code')} {refused.get('message')}")
    return answer
