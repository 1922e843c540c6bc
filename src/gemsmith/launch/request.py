"""A launch as it was asked for, checked against the plan, with everything chosen: what rendering starts from.

What a recipe reads of this machine, and where the launched one finds it instead.

Bytes that a launch's machine holds beside the chip: its program, the run directory, weights that it downloads.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gemsmith.checkpoints.hub import is_hub_id
from gemsmith.errors import InputError, RecipeError, suggest
from gemsmith.hardware import Catalog, Machine, find_machine, load_catalog
from gemsmith.launch.cost import default_region, estimate_cost, find_price, price_of_hour
from gemsmith.launch.provider import MOUNT, LaunchCost, Request, Target, WithReason, check_wheel
from gemsmith.launch.shards import ImageShards, find_images
from gemsmith.plan import plan_only
from gemsmith.recipe.backends import BACKENDS
from gemsmith.recipe.load import dump_recipe, with_values
from gemsmith.recipe.schema import Recipe, ResolvedValue
from gemsmith.runs.plan_records import PlanRecord
from gemsmith.runs.resolve import recipe_variant, resolve_file
from gemsmith.runs.stages import SERVED, STAGES
from gemsmith.system.version import __version__

_KEYS = ("checkpoint", "data.train", "data.eval", "data.template", "train.init_adapter", "hardware.catalog")
_ROWS = ("data.train", "data.eval")
FOLDER = "inputs"
"""Below the folder that holds the launched recipe."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a launch brings along."""

    placed: tuple[ResolvedValue, ...] = ()
    """Keys of the recipe that name another place there."""
    copies: Mapping[str, str]
    """A local file or folder -> where it goes."""
    images: tuple[ImageShards, ...] = ()
    weights_bucket: str | None = None
    """The bucket of the base, where it is mounted."""


def find_inputs(recipe: Recipe, root: str, *, mount: str | None) -> Inputs:
    """What the recipe reads of this machine, with the places that it gets below `root`.

    Raises RecipeError for a file that does not exist, DataError as find_images. `mount`: where the machine sees the
    bucket of a base in one.
    """
    placed, copies, weights, images = [], {}, None, []
    places: dict[str, str] = {}
    for key in _KEYS:
        value = _value_at(recipe, key)
        if not isinstance(value, str):
            continue
        if value.startswith("gs://") and key == "checkpoint" and mount is not None:
            weights, _, folder = value.removeprefix("gs://").partition("/")
            placed.append(ResolvedValue(key, f"{mount}/{folder}", f"{value}, mounted read-only"))
        elif "://" not in value and Path(value).is_absolute():
            if value not in places:
                places[value] = f"{FOLDER}/{key.replace('.', '-')}/{Path(value).name}"
                found = _images(recipe, key, Path(value))
                images += [found] if found else []
                if not (found and Path(value).is_dir()):  # of a folder of images there is nothing else to copy
                    copies[value] = f"{root}/launched/{places[value]}"
            placed.append(ResolvedValue(key, places[value], f"{value} of the machine that launched it"))
        elif "://" not in value and key not in ("checkpoint", *_ROWS):
            raise RecipeError(f"{key}: {value} does not exist")
        elif "://" not in value and key != "checkpoint":
            raise RecipeError(f"{key}: {value} does not exist; give a file, a folder or rows to make")
    if recipe.train.checkpoint_folder is not None and "://" not in recipe.train.checkpoint_folder:
        raise RecipeError(
            f"train.checkpoint_folder: {recipe.train.checkpoint_folder} is a folder of this machine; set it to null, "
            "saved steps then go to the launch's bucket"
        )
    return Inputs(placed=tuple(placed), copies=copies, images=tuple(images), weights_bucket=weights)


def _images(recipe: Recipe, key: str, path: Path) -> ImageShards | None:
    if not path.exists():
        raise RecipeError(f"{key}: {path} does not exist")
    return find_images(recipe.data, key, path) if key in _ROWS else None


def _value_at(recipe: Recipe, key: str) -> object:
    value: object = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


STAGES_THERE = tuple(stage for stage in STAGES if stage not in SERVED)
"""What the images can run; vLLM, which the others need, is in none of them."""
_ACCOUNTS = {"cloud-run": "gemsmith", "tpu-vm": "gemsmith", "gke": "gemsmith", "sky": "skypilot-v1"}
"""SkyPilot makes its own, and its machines run as it unless its configuration says otherwise (gcp.remote_identity)."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,26}[a-z0-9])?")
_BUCKET = re.compile(r"gs://[a-z0-9][-a-z0-9_.]{1,61}[a-z0-9](/[\w./=-]+)?")
_WORD = re.compile(r"[\w.:/@-]+")
_WORDS = ("project", "region", "zone", "image", "service_account", "secret", "network", "subnet", "cluster", "queue")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line's options."""

    name: str | None = None
    machine: str | None = None
    stages: str | None = None
    bucket: str
    project: str
    region: str | None = None
    zone: str | None = None
    image: str | None = None
    python: Path | None = None
    service_account: str | None = None
    secret: str | None = None
    spot: bool = False
    network: str | None = None
    subnet: str | None = None
    timeout_hours: float | None = None
    retries: int = 3
    cluster: str | None = None
    queue: str | None = None
    overrides: tuple[str, ...] = ()


def make_request(source: Path, target: Target, on: str, options: Options) -> Request:
    """The request for a recipe on a target. Raises InputError for what is known not to work; nothing is created.

    Without a machine it is the cheapest that fits: of the recipe's, or of all that the target gives. A target that
    takes whichever it gets has the others of that kind beside it.
    """
    recipe, derived = resolve_file(source, options.overrides)
    _check_words(options)
    _check_python(target, on, options)
    name = _name(options.name or re.sub(r"[^a-z0-9]+", "-", source.stem.lower()).strip("-"))
    stages = _stages(options)
    catalog = load_catalog(recipe.hardware.catalog)
    root = f"{_bucket(options.bucket)}/{name}"
    inputs = find_inputs(recipe, root, mount=MOUNT if target.MOUNTS_WEIGHTS else None)
    unfit, refused = list[InputError](), list[InputError]()
    found: list[Request] = []
    machines = _machines(recipe, catalog, target, on, options.machine)
    for machine in sorted(machines, key=lambda machine: _usd_per_hour(machine, options)):
        request = None
        try:
            request = _request(root, machine, recipe, derived, inputs=inputs, on=on, stages=stages, options=options)
            target.check(request)
            found.append(request)
            if not target.SUPPORTS_ANY_MACHINE:
                break
        except InputError as error:
            (unfit if request is None else refused).append(error)
    if found:
        return _joined(found) if target.SUPPORTS_ANY_MACHINE else found[0]
    # What stands in the way of a machine that fits is the likeliest to be put right.
    problems = refused + unfit
    raise _nothing_fits(on, problems) if len({str(problem) for problem in problems}) > 1 else problems[0]


def _joined(found: Sequence[Request]) -> Request:
    """The first request, with the other machines of its kind, the dearest one's bill and the longest time."""
    first = found[0]
    alike = [request for request in found if request.machine.chip.kind == first.machine.chip.kind]
    dearest = max((request.bill for request in alike), key=lambda bill: bill.usd_per_hour)
    longest = max((request.bill.timeout_s for request in alike), key=lambda timeout: float(timeout.value))
    bill = replace(dearest, timeout_s=longest, uncounted="a preemption begins an attempt that is not counted; ")
    return replace(first, others=tuple(alike[1:]), bill=bill)


def _request(
    root: str,
    machine: Machine,
    recipe: Recipe,
    derived: Sequence[ResolvedValue],
    *,
    inputs: Inputs,
    on: str,
    stages: tuple[str, ...],
    options: Options,
) -> Request:
    _check_backend(recipe, machine, stages, options)
    plan = plan_only(with_values(recipe, [ResolvedValue("hardware.machines", (machine.name,), "")]))
    _refuse_unfit(plan)
    region = _region(machine, options)
    placed = [*inputs.placed, *_machine_keys(recipe, machine, root)]
    moved = with_values(recipe, placed)
    return Request(
        name=root.rpartition("/")[2],
        recipe=moved,
        recipe_text=dump_recipe(moved, [*(item for item in derived if item.key not in _keys(placed)), *placed]),
        inputs=inputs.copies,
        images=inputs.images,
        stages=stages,
        machine=machine,
        plan=plan.machines[0],
        variant=recipe_variant(recipe),
        parameters=plan.parameters,
        trained_parameters=plan.trained_parameters,
        bill=_bill(plan, machine, region, on, options),
        project=options.project,
        region=region,
        zone=options.zone,
        root=root,
        image=_image(machine, region, options),
        python=options.python and options.python.resolve(),
        service_account=options.service_account or f"{_ACCOUNTS[on]}@{options.project}.iam.gserviceaccount.com",
        secret=_secret(recipe.checkpoint, options),
        max_model_len=None if "serve.max_model_len" in _keys(derived) else recipe.serve.max_model_len,
        spot=options.spot,
        network=options.network,
        subnet=options.subnet,
        queue=options.queue,
        cluster=options.cluster,
        weights_bucket=inputs.weights_bucket,
    )


def _bill(plan: PlanRecord, machine: Machine, region: str, on: str, options: Options) -> LaunchCost:
    return estimate_cost(
        machine,
        plan.machines[0],
        steps=plan.steps,
        region=region,
        spot=options.spot,
        timeout_hours=options.timeout_hours,
        # A TPU VM is one attempt: its program starts again on the same node, within the same time.
        attempts=1 if on == "tpu-vm" else options.retries + 1,
    )


def _keys(items: Sequence[ResolvedValue]) -> set[str]:
    return {item.key for item in items}


def _secret(checkpoint: str, options: Options) -> str | None:
    if options.secret is not None and not is_hub_id(checkpoint):
        raise InputError(
            f"--secret {options.secret}: {checkpoint} is not downloaded from the Hugging Face hub; leave it out"
        )
    return options.secret


def _check_words(options: Options) -> None:
    """What goes into scripts and manifests is a word, whoever wrote the command line."""
    for option in _WORDS:
        value = getattr(options, option)
        if value is not None and not _WORD.fullmatch(value):
            raise InputError(f"--{option.replace('_', '-')} {value!r}: must be letters, digits and . : / @ - _ alone")


def _check_python(target: Target, on: str, options: Options) -> None:
    if options.python is None:
        return
    if not target.SUPPORTS_WHEEL:
        raise InputError(f"--python {options.python}: --on {on} runs a container; leave it out, or choose --on tpu-vm")
    if options.image is not None:
        raise InputError("--image, --python: give one of them")
    check_wheel(options.python)


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InputError(
            f"--name {name}: must be 1 to 28 of a-z, 0-9 and -, begin with a letter and not end with -; it names jobs, "
            "nodes and pods"
        )
    return name


def _bucket(url: str) -> str:
    if not _BUCKET.fullmatch(url.rstrip("/")):
        raise InputError(
            f"--bucket {url}: must be gs://BUCKET or gs://BUCKET/FOLDER, and BUCKET 3 to 63 of a-z, 0-9, -, _ and ."
        )
    return url.rstrip("/")


def _stages(options: Options) -> tuple[str, ...]:
    if options.stages is None:
        return STAGES_THERE
    stages = tuple(filter(None, options.stages.split(",")))
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise InputError(
            f"--stages {unknown[0]}: is no stage{suggest(unknown[0], STAGES)}; allowed: {', '.join(STAGES)}"
        )
    if (served := [stage for stage in stages if stage in SERVED]) and options.image is None:
        raise InputError(
            f"--stages {served[0]}: needs vLLM, which Gemsmith's images do not have; run it after gemsmith launch "
            "fetch, or name an image of your own with --image"
        )
    if not stages or list(stages) != [stage for stage in STAGES if stage in stages]:
        raise InputError(f"--stages {options.stages}: must name stages in their order: {','.join(STAGES)}")
    return stages


def _check_backend(recipe: Recipe, machine: Machine, stages: tuple[str, ...], options: Options) -> None:
    """The image for GPUs has PyTorch, that for TPUs JAX."""
    if machine.chip.kind == "gpu" and "train" in stages and recipe.train.backend == "tunix" and options.image is None:
        raise RecipeError(
            "train.backend: tunix was given, but Gemsmith's image for GPUs trains with trl; add --set "
            "train.backend=trl, or name an image of your own with --image"
        )


def _machines(recipe: Recipe, catalog: Catalog, target: Target, on: str, wanted: str | None) -> list[Machine]:
    """Those to try, in order."""
    given = [machine for machine in catalog.machines.values() if target.gives(machine)]
    names = ", ".join(machine.name for machine in given)
    if wanted is not None:
        machine = find_machine(catalog, wanted)
        if not target.gives(machine) and machine.slices > 1:
            raise InputError(
                f"--machine {wanted}: --on {on} does not have it; several slices are launched by --on gke, each of two "
                "hosts or more, such as 2xv6e-16"
            )
        if not target.gives(machine):
            raise InputError(f"--machine {wanted}: --on {on} does not have it; it has {names}")
        return [machine]
    asked = [find_machine(catalog, name) for name in recipe.hardware.machines]
    if not given:
        raise InputError(f"--on {on}: the catalog has no machine of it; add one in hardware.catalog")
    named = [machine for machine in asked if target.gives(machine)]
    return named if named and "machines" in recipe.hardware.model_fields_set else given


def _usd_per_hour(machine: Machine, options: Options) -> float:
    """Where it would be rented; infinite where the catalog has no price, which is told when it is that one's turn."""
    with suppress(InputError):
        price = find_price(machine, _region(machine, options), spot=options.spot)
        return price_of_hour(price, spot=options.spot) or 0.0
    return math.inf


def _refuse_unfit(plan: PlanRecord) -> None:
    machine = plan.machines[0]
    if not machine.fits:
        raise RecipeError(f"--machine {machine.name}: does not fit by the plan: {machine.notes[0]}")


def _nothing_fits(on: str, problems: Sequence[InputError]) -> InputError:
    first = str(problems[0])
    return InputError(f"{first} (of {len(problems)} machines of --on {on} none can be had; choose one with --machine)")


def _region(machine: Machine, options: Options) -> str:
    if options.zone is not None:
        return options.zone.rpartition("-")[0]
    region = options.region or default_region(machine, spot=options.spot) or ""
    find_price(machine, region, spot=options.spot)
    return region


def _machine_keys(recipe: Recipe, machine: Machine, root: str) -> list[ResolvedValue]:
    """Keys of the recipe that the machine decides."""
    keys = [ResolvedValue("hardware.machines", (machine.name,), "--machine")]
    if recipe.train.checkpoint_folder is not None or machine.hosts == 1:
        return keys
    if not BACKENDS[recipe.train.backend].buckets:
        raise RecipeError(
            f"train.backend: {recipe.train.backend} saves to folders only, and {machine.name} has {machine.hosts} "
            "hosts that share none; set it to tunix, or choose a machine of one host"
        )
    return [*keys, ResolvedValue("train.checkpoint_folder", f"{root}/checkpoints", "all hosts must see it")]


def _image(machine: Machine, region: str, options: Options) -> WithReason:
    if options.image is not None:
        return WithReason(options.image, "--image")
    stack = "train-tpu" if machine.chip.kind == "tpu" else "train-gpu"
    where = f"{region}-docker.pkg.dev/{options.project}/gemsmith/{stack}:{__version__}"
    return WithReason(where, f"docker/{stack}.Dockerfile, as docker/cloudbuild.yaml builds it")


GB = 10**9
PROGRAM_BYTES = 16 * GB
"""Python and its libraries, rows, a few images, and a layer at a time of what is loaded or merged; assumed."""
WEIGHT_BYTES = 2
"""A parameter, in bfloat16."""
_WORTH_SAYING_BYTES = GB // 10
SAVED_BYTES = 12
"""A trained parameter and its two moments, in float32."""
ADAPTER_BYTES = 4


def disk_bytes(request: Request, *, with_weights: bool) -> dict[str, int]:
    """What -> bytes. `with_weights`: the base is copied to the machine rather than read in place."""
    train, weights = request.recipe.train, WEIGHT_BYTES * request.parameters
    held = {"the program": PROGRAM_BYTES}
    if (images := sum(each.total_bytes for each in request.images)) >= _WORTH_SAYING_BYTES:
        held["images"] = images
    if with_weights:
        held["the base"] = weights
    if "train" in request.stages:
        # One more is being written while those to keep are there.
        held["saved steps"] = (train.save_total_limit + 1) * SAVED_BYTES * request.trained_parameters
    if "export" in request.stages:
        held["merged weights"] = weights + ADAPTER_BYTES * request.trained_parameters
    return held


def downloads_weights(request: Request) -> bool:
    """Whether the base comes from the Hugging Face hub, or is copied from a bucket that the target does not mount."""
    checkpoint = request.recipe.checkpoint
    return is_hub_id(checkpoint) or checkpoint.startswith("gs://")


def format_footprint(held: dict[str, int]) -> str:
    """The items and their sum, largest first.

    >>> format_footprint({"a": 2_000_000_000, "b": 30_000_000_000})
    '32 GB: b 30, a 2'
    """
    largest: Iterable[tuple[str, int]] = sorted(held.items(), key=lambda item: -item[1])
    return f"{sum(held.values()) / GB:.0f} GB: " + ", ".join(f"{what} {count / GB:.2g}" for what, count in largest)
