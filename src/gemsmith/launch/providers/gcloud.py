"""The preflight's lines that targets share; each names what to do where it fails."""

import json

from gemsmith.launch.provider import Check, Request

WIDEST_SUBNET = 26
"""Direct VPC takes a /26 or larger."""


def first_checks(request: Request, *, apis: tuple[str, ...]) -> list[Check]:
    """gcloud, its login, the project and its APIs."""
    project = request.project
    enable = " ".join(apis)
    listed = ("gcloud", "services", "list", "--enabled", "--project", project, "--format=value(config.name)")
    return [
        Check(
            name="gcloud is here",
            command=("gcloud", "version"),
            remedy="install it: https://cloud.google.com/sdk/docs/install",
        ),
        Check(
            name="gcloud is logged in",
            command=("gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"),
            remedy="gcloud auth login",
            complaint=lambda output: None if output.strip() else "no account is active",
        ),
        Check(
            name=f"project {project}",
            command=("gcloud", "projects", "describe", project, "--format=value(projectId)"),
            remedy="check --project, and that your account may see it",
        ),
        Check(
            name=f"APIs {enable}",
            command=listed,
            remedy=f"gcloud services enable {enable} --project {project}",
            complaint=lambda output: _missing(apis, output),
        ),
    ]


def bucket_checks(request: Request) -> list[Check]:
    """The bucket is there, and in the region of the machine."""
    bucket = f"gs://{request.bucket}"
    checks = [_bucket_check(request, bucket, made=True)]
    if request.weights_bucket not in (None, request.bucket):
        checks.append(_bucket_check(request, f"gs://{request.weights_bucket}", made=False))
    return checks


def _bucket_check(request: Request, bucket: str, *, made: bool) -> Check:
    region = request.region
    make = f"gcloud storage buckets create {bucket} --project {request.project} --location {region}"
    move = f"copy the weights to a bucket in {region}, and name it in checkpoint"
    return Check(
        name=f"{bucket} in {region}",
        command=("gcloud", "storage", "buckets", "describe", bucket, "--format=value(location)"),
        remedy=f"{make} --uniform-bucket-level-access" if made else move,
        complaint=lambda output: None if _near(output.strip(), region) else f"it is in {output.strip().lower()}",
    )


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


def image_roles(request: Request) -> tuple[str, ...]:
    """What lets an account pull the image."""
    return ("roles/artifactregistry.reader",) if in_artifact_registry(str(request.image.value)) else ()


def image_check(request: Request) -> Check:
    """The image is there; only Artifact Registry can be asked by gcloud."""
    image, where = str(request.image.value), f"--project {request.project}"
    name, other = f"image {image}", "or name another with --image"
    if not in_artifact_registry(image):
        public = "the machine pulls it without a login, so make sure that it is there and public"
        return Check(name=name, command=("docker", "manifest", "inspect", image), remedy=public, needed=False)
    stack = image.rpartition("/")[2].partition(":")[0]
    region = request.region
    build = (
        f"gcloud artifacts repositories create gemsmith --repository-format docker --location {region} {where}, "
        f"unless {region} has it, and: gcloud builds submit --config docker/cloudbuild.yaml --region {region} "
        f"{where} --substitutions _STACK={stack},_REGION={region}"
    )
    return Check(
        name=name,
        command=("gcloud", "artifacts", "docker", "images", "describe", image, "--format=value(image_summary.digest)"),
        remedy=f"{'push it there' if request.image.reason == '--image' else build}, {other}",
    )


def account_checks(request: Request, *, roles: tuple[str, ...] = ()) -> list[Check]:
    """The service account, its role on the bucket, and the project's roles that it needs."""
    account, member = request.service_account, f"serviceAccount:{request.service_account}"
    bucket, project = f"gs://{request.bucket}", request.project
    checks = [
        Check(
            name=f"service account {account}",
            command=("gcloud", "iam", "service-accounts", "describe", account, "--project", project),
            remedy=f"gcloud iam service-accounts create {account.partition('@')[0]} --project {project}",
        ),
        _bucket_role_check(bucket, "roles/storage.objectUser", member),
    ]
    if request.weights_bucket not in (None, request.bucket):
        checks.append(_bucket_role_check(f"gs://{request.weights_bucket}", "roles/storage.objectViewer", member))
    checks += [_project_role_check(project, role, member) for role in roles]
    return checks


def _bucket_role_check(bucket: str, role: str, member: str) -> Check:
    return Check(
        name=f"{role} on {bucket}",
        command=("gcloud", "storage", "buckets", "get-iam-policy", bucket, "--format=json"),
        remedy=f"gcloud storage buckets add-iam-policy-binding {bucket} --member {member} --role {role}",
        complaint=lambda output: missing_role(output, role, member),
    )


def _project_role_check(project: str, role: str, member: str) -> Check:
    return Check(
        name=f"{role} in the project",
        command=("gcloud", "projects", "get-iam-policy", project, "--format=json"),
        remedy=f"gcloud projects add-iam-policy-binding {project} --member {member} --role {role}",
        complaint=lambda output: missing_role(output, role, member),
    )


def secret_checks(request: Request) -> list[Check]:
    """The token's secret in Secret Manager, and the account's role on it; empty where none is used."""
    if request.secret is None:
        return []
    secret, project, member = request.secret, request.project, f"serviceAccount:{request.service_account}"
    role = "roles/secretmanager.secretAccessor"
    add = f"--member {member} --role {role} --project {project}"
    return [
        Check(
            name=f"secret {secret}, the Hugging Face token",
            command=("gcloud", "secrets", "versions", "describe", "latest", "--secret", secret, "--project", project),
            remedy=f"gcloud secrets create {secret} --data-file=FILE --project {project}, or name another",
        ),
        Check(
            name=f"{role} on it",
            command=("gcloud", "secrets", "get-iam-policy", secret, "--project", project, "--format=json"),
            remedy=f"gcloud secrets add-iam-policy-binding {secret} {add}",
            complaint=lambda output: missing_role(output, role, member),
        ),
    ]


def subnet_check(request: Request) -> list[Check]:
    """That a subnet for Direct VPC is large enough; empty where none is used."""
    if request.subnet is None:
        return []
    return [
        Check(
            name=f"subnet {request.subnet} is /{WIDEST_SUBNET} or larger",
            command=(
                *("gcloud", "compute", "networks", "subnets", "describe", request.subnet, "--region", request.region),
                *("--project", request.project, "--format=value(ipCidrRange)"),
            ),
            remedy=f"name a subnet of /{WIDEST_SUBNET} or larger in {request.region} with --subnet",
            complaint=_too_small,
        )
    ]


def _too_small(output: str) -> str | None:
    given = output.strip()
    bits = given.rpartition("/")[2]
    return None if bits.isdecimal() and int(bits) <= WIDEST_SUBNET else f"it is {given or 'not there'}"


def _missing(wanted: tuple[str, ...], output: str) -> str | None:
    missing = [name for name in wanted if name not in output.split()]
    return f"not enabled: {', '.join(missing)}" if missing else None


def missing_role(output: str, role: str, member: str) -> str | None:
    """What is wrong with a policy, as JSON, that is to give the member the role; None where nothing is."""
    try:
        bindings = json.loads(output or "{}").get("bindings", [])
    except (ValueError, AttributeError):
        return "its policy cannot be read"
    there = any(binding.get("role") == role and member in binding.get("members", ()) for binding in bindings)
    return None if there else f"{member.partition(':')[2]} does not have it"
