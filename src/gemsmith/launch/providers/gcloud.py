"""The preflight's lines that targets share; each names what to do where it fails."""

import json
import shlex

from gemsmith.launch.provider import Command, LaunchRequest, PreflightCheck

WIDEST_SUBNET = 26
"""Direct VPC takes a /26 or larger."""


def first_checks(request: LaunchRequest, *, apis: tuple[str, ...]) -> list[PreflightCheck]:
    """gcloud, its login, the project and its APIs."""
    project, enable = request.options.project, " ".join(apis)

    def missing(output: str) -> str | None:
        names = [name for name in apis if name not in output.split()]
        return f"not enabled: {', '.join(names)}" if names else None

    return [
        PreflightCheck(
            name="gcloud is here",
            command=("gcloud", "version"),
            remedy="install it: https://cloud.google.com/sdk/docs/install",
        ),
        PreflightCheck(
            name="gcloud is logged in",
            command=("gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"),
            remedy="gcloud auth login",
            complaint=lambda output: None if output.strip() else "no account is active",
        ),
        PreflightCheck(
            name=f"project {project}",
            command=("gcloud", "projects", "describe", project, "--format=value(projectId)"),
            remedy="check --project, and that your account may see it",
        ),
        PreflightCheck(
            name=f"APIs {enable}",
            command=("gcloud", "services", "list", "--enabled", "--project", project, "--format=value(config.name)"),
            remedy=f"gcloud services enable {enable} --project {project}",
            complaint=missing,
        ),
    ]


def common_checks(request: LaunchRequest, *, roles: tuple[str, ...] = ()) -> list[PreflightCheck]:
    """The buckets, the image if there is one, and the service account with its `roles` in the project."""
    image = [] if request.options.wheel else [image_check(request)]
    return [*bucket_checks(request), *image, *account_checks(request, roles=roles)]


def bucket_checks(request: LaunchRequest) -> list[PreflightCheck]:
    """The bucket is there, and in the region of the machine; that of the weights, too."""
    region, bucket = request.options.region, f"gs://{request.bucket}"
    create = f"gcloud storage buckets create {bucket} --project {request.options.project} --location {region}"
    remedies = {bucket: f"{create} --uniform-bucket-level-access"}
    if request.weights_bucket is not None:
        move = f"copy the weights to a bucket in {region}, and name it in checkpoint"
        remedies.setdefault(f"gs://{request.weights_bucket}", move)
    return [
        PreflightCheck(
            name=f"{place} in {region}",
            command=("gcloud", "storage", "buckets", "describe", place, "--format=value(location)"),
            remedy=remedy,
            complaint=lambda output: None if _near(output.strip(), region) else f"it is in {output.strip().lower()}",
        )
        for place, remedy in remedies.items()
    ]


def _near(location: str, region: str) -> bool:
    """Whether reads from there stay in the region, or in the multi-region that holds it.

    >>> _near("US-CENTRAL1", "us-central1"), _near("EU", "europe-west4"), _near("US", "europe-west4")
    (True, True, False)
    """
    location = location.lower()
    return location == region or region.startswith({"us": "us-", "eu": "europe-", "asia": "asia-"}.get(location, "-"))


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


def image_roles(request: LaunchRequest) -> tuple[str, ...]:
    """What lets an account pull the image."""
    return ("roles/artifactregistry.reader",) if in_artifact_registry(str(request.image.value)) else ()


def image_check(request: LaunchRequest) -> PreflightCheck:
    """The image is there; only Artifact Registry can be asked by gcloud."""
    image, where, region = str(request.image.value), f"--project {request.options.project}", request.options.region
    if not in_artifact_registry(image):
        return PreflightCheck(
            name=f"image {image}",
            command=("docker", "manifest", "inspect", image),
            remedy="the machine pulls it without a login, so make sure that it is there and public",
            needed=False,
        )
    stack = image.rpartition("/")[2].partition(":")[0]
    build = (
        f"gcloud artifacts repositories create gemsmith --repository-format docker --location {region} {where}, "
        f"unless {region} has it, and: gcloud builds submit --config docker/cloudbuild.yaml --region {region} "
        f"{where} --substitutions _STACK={stack},_REGION={region}"
    )
    make = "push it there" if request.image.reason == "--image" else build
    return PreflightCheck(
        name=f"image {image}",
        command=("gcloud", "artifacts", "docker", "images", "describe", image, "--format=value(image_summary.digest)"),
        remedy=f"{make}, or name another with --image",
    )


def account_checks(request: LaunchRequest, *, roles: tuple[str, ...] = ()) -> list[PreflightCheck]:
    """The service account, its role on the buckets, and the project's roles that it needs."""
    account, project = request.options.service_account, request.options.project
    buckets = {f"gs://{request.bucket}": "roles/storage.objectUser"}
    if request.weights_bucket is not None:
        buckets.setdefault(f"gs://{request.weights_bucket}", "roles/storage.objectViewer")
    member = f"serviceAccount:{account}"
    return [
        PreflightCheck(
            name=f"service account {account}",
            command=("gcloud", "iam", "service-accounts", "describe", account, "--project", project),
            remedy=f"gcloud iam service-accounts create {account.partition('@')[0]} --project {project}",
        ),
        *(role_check(("storage", "buckets"), bucket, role, member) for bucket, role in buckets.items()),
        *(role_check(("projects",), project, role, member, on="in the project") for role in roles),
    ]


def secret_checks(request: LaunchRequest) -> list[PreflightCheck]:
    """The token's secret in Secret Manager, and the account's role on it; empty where none is used."""
    secret, project, member = request.options.secret, request.options.project, request.options.service_account
    if secret is None:
        return []
    where, role = ("--project", project), "roles/secretmanager.secretAccessor"
    return [
        PreflightCheck(
            name=f"secret {secret}, the Hugging Face token",
            command=("gcloud", "secrets", "versions", "describe", "latest", "--secret", secret, *where),
            remedy=f"gcloud secrets create {secret} --data-file=FILE --project {project}, or name another",
        ),
        role_check(("secrets",), secret, role, f"serviceAccount:{member}", where=where, on="on it"),
    ]


def role_check(
    kind: Command, name: str, role: str, member: str, *, where: Command = (), on: str | None = None
) -> PreflightCheck:
    """That the member has the role by the policy of a thing of this kind, such as storage buckets or projects."""

    def missing(output: str) -> str | None:
        try:
            bindings = json.loads(output or "{}").get("bindings", [])
        except (ValueError, AttributeError):
            return "its policy cannot be read"
        there = any(binding.get("role") == role and member in binding.get("members", ()) for binding in bindings)
        return None if there else f"{member.partition(':')[2]} does not have it"

    add = ("gcloud", *kind, "add-iam-policy-binding", name, "--member", member, "--role", role, *where)
    return PreflightCheck(
        name=f"{role} {on or f'on {name}'}",
        command=("gcloud", *kind, "get-iam-policy", name, *where, "--format=json"),
        remedy=shlex.join(add),
        complaint=missing,
    )


def subnet_check(request: LaunchRequest) -> list[PreflightCheck]:
    """That a subnet for Direct VPC is large enough; empty where none is used."""
    subnet, region, project = request.options.subnet, request.options.region, request.options.project
    if subnet is None:
        return []

    def too_small(output: str) -> str | None:
        given = output.strip()
        bits = given.rpartition("/")[2]
        return None if bits.isdecimal() and int(bits) <= WIDEST_SUBNET else f"it is {given or 'not there'}"

    describe = ("gcloud", "compute", "networks", "subnets", "describe", subnet, "--region", region)
    return [
        PreflightCheck(
            name=f"subnet {subnet} is /{WIDEST_SUBNET} or larger",
            command=(*describe, "--project", project, "--format=value(ipCidrRange)"),
            remedy=f"name a subnet of /{WIDEST_SUBNET} or larger in {region} with --subnet",
            complaint=too_small,
        )
    ]


def name_check(request: LaunchRequest, kind: str, command: Command) -> PreflightCheck:
    """That nothing of this kind has the launch's name; the command prints names, kubectl with the kind and a slash."""
    name = request.options.name

    def taken(output: str) -> str | None:
        return f"there is {name}" if name in (word.rpartition("/")[2] for word in output.split()) else None

    return PreflightCheck(
        name=f"no other {kind} named {name}",
        command=command,
        remedy=f"choose another --name, or remove it: gemsmith launch clean {name}",
        complaint=taken,
    )
