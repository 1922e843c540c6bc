"""A launch as it was asked for, checked against the plan and priced, with everything chosen for rendering."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gemsmith.checkpoints.folder import is_hub_id
from gemsmith.errors import InputError, RecipeError
from gemsmith.hardware import Catalog, Machine, Price, find_machine, load_catalog
from gemsmith.launch.provider import (
    MOUNT,
    PREDICT,
    STAGES_THERE,
    WITH_VLLM,
    WORD,
    ChosenOptions,
    LaunchCost,
    LaunchInputs,
    LaunchOptions,
    LaunchRequest,
    Target,
    WithReason,
)
from gemsmith.launch.shards import find_images
from gemsmith.launch.upload import check_wheel
from gemsmith.pipeline.preflight import refuse_problems
from gemsmith.plan.stage import plan_only
from gemsmith.recipe.backends import BACKENDS
from gemsmith.recipe.keys import PATHS, value_at
from gemsmith.recipe.load import dump_recipe, with_values
from gemsmith.recipe.schema import Recipe, ResolvedValue, eval_tasks
from gemsmith.runs.plan_records import MachinePlan
from gemsmith.runs.resolve import recipe_variant, resolve_file
from gemsmith.runs.run import Run
from gemsmith.runs.stages import STAGES, check_stage_names
from gemsmith.system.files import expanduser
from gemsmith.system.version import __version__
from gemsmith.tasks import SOURCES

FOLDER = "inputs"  # of what the recipe reads of this machine, below the folder that holds the launched recipe
BEFORE_AND_AFTER_S = 2 * 3600
"""For the weights to arrive, compilation, export and verify; assumed, for the largest model."""
EVAL_S = 2 * 3600  # for both models to load and answer; assumed, likewise
SLACK = 1.5  # on the plan's upper estimate
GCP = "gcp"
ROWS = "rows"  # which predict answers, beside the keys of the recipe that name rows
_ROWS = ("data.train", "data.eval")
_ACCOUNTS = {"cloud-run": "gemsmith", "tpu-vm": "gemsmith", "gke": "gemsmith", "sky": "skypilot-v1"}
"""SkyPilot makes its own, and its machines run as it unless its configuration says otherwise (gcp.remote_identity)."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,26}[a-z0-9])?")
_BUCKET = re.compile(r"gs://[a-z0-9][-a-z0-9_.]{1,61}[a-z0-9](/[\w./=-]+)?")
_WORDS = ("project", "region", "zone", "image", "service_account", "secret", "network", "subnet", "cluster", "queue")


def find_inputs(
    recipe: Recipe, root: str, *, mount: str | None, rows: str | None = None, trains: bool = True
) -> LaunchInputs:
    """What the recipe, and predict of its `rows`, read of this machine, with the places that it gets below `root`.

    Raises RecipeError for a missing file, DataError as find_images. `mount`: where the machine sees a base's bucket.
    Without `trains` the rows of data.train and data.eval are neither looked for nor copied.
    """
    placed, copies, weights, images, there = [], {}, None, [], rows
    arrived, homes = set[str](), dict[str, str]()  # files; file -> the key that its place is called by
    for key, value in [*((key, value_at(recipe, key)) for key in PATHS), (ROWS, rows)]:
        if isinstance(value, tuple) and any("://" not in one.path and one.path[:4] != "hub:" for one in value):
            raise RecipeError(f"{key}: several sources, some here, of which a launch copies one; join them in a folder")
        if not isinstance(value, str):
            continue
        if "://" in value or value.startswith("hub:"):
            if key == "checkpoint" and value.startswith("gs://") and mount is not None:
                weights, _, folder = value.removeprefix("gs://").partition("/")
                placed.append(ResolvedValue(key, f"{mount}/{folder}", f"{value}, mounted read-only"))
            continue
        path = Path(value)
        if not path.is_absolute() and key == "checkpoint":
            continue  # of the Hugging Face hub
        wanted = (trains or key not in _ROWS) and value not in arrived
        if not path.is_absolute() or (wanted and not path.exists()):
            other = "; give a file, a folder or rows to make" if key in _ROWS and not path.is_absolute() else ""
            raise RecipeError(f"{key}: {value} does not exist{other}")
        home = homes.setdefault(value, key)
        place = f"{FOLDER}/{home.replace('.', '-')}/{path.name}"
        if wanted:
            arrived.add(value)
            found = find_images(None if key == ROWS else recipe.data, home, path) if key in (*_ROWS, ROWS) else None
            images += [found] if found else []
            if not (found and path.is_dir()):  # of a folder of images there is nothing else to copy
                copies[value] = f"{root}/launched/{place}"
        if key == ROWS:
            there = place
        else:
            placed.append(ResolvedValue(key, place, f"{value} of the machine that launched it"))
    saves = recipe.train.checkpoint_folder
    if saves is not None and "://" not in saves:
        remedy = "set it to null, saved steps then go to the launch's bucket"
        raise RecipeError(f"train.checkpoint_folder: {saves} is a folder of this machine; {remedy}")
    return LaunchInputs(placed=tuple(placed), copies=copies, rows=there, images=tuple(images), weights_bucket=weights)


def make_request(source: Path, target: Target, provider: str, options: LaunchOptions) -> LaunchRequest:
    """The request for a recipe on a target. Raises InputError for what is known not to work; nothing is created.

    Without a machine it is the cheapest that fits: of the recipe's, or of all that the target gives.
    """
    recipe, derived = resolve_file(source, options.overrides, stages=())
    refuse_problems(Run(path=Path(), recipe=recipe), options.stages or STAGES_THERE, "names")
    if options.stages is None:
        # What Gemsmith's images can do; eval only of held-out rows, since other tasks bring programs of their own.
        tasks = {task.task for task in eval_tasks(recipe)}
        scored = "evaluates" in target.FEATURES and options.image is None and tasks and tasks.isdisjoint(SOURCES)
        options = options.model_copy(update={"stages": (*STAGES_THERE, *(("eval",) if scored else ()))})
    name = options.name or re.sub(r"[^a-z0-9]+", "-", source.stem.lower()).strip("-")
    _check_options(name, target, provider, options)
    rows = _find_rows(target, options)
    catalog = load_catalog(recipe.hardware.catalog)
    root = f"{options.bucket.rstrip('/')}/{name}"
    mount = MOUNT if "mounts weights" in target.FEATURES else None
    inputs = find_inputs(recipe, root, mount=mount, rows=rows, trains=options.stages != (PREDICT,))
    if options.secret is not None and not is_hub_id(recipe.checkpoint):
        what = f"{recipe.checkpoint} is not downloaded from the Hugging Face hub"
        raise InputError(f"--secret {options.secret}: {what}; leave it out")
    unfit, refused, found = list[InputError](), list[InputError](), list[LaunchRequest]()
    for machine in _machines(recipe, catalog, target, provider, options):
        request = None
        try:
            request = _request_on(machine, recipe, derived, inputs, root=root, provider=provider, options=options)
            target.check(request)
            found.append(request)
            if "any machine" not in target.FEATURES:
                return request
        except InputError as error:
            (unfit if request is None else refused).append(error)
    if found:
        return _join(found)
    # What stands in the way of a machine that fits is the likeliest to be put right.
    problems = refused + unfit
    if len({str(problem) for problem in problems}) > 1:
        others = f"of {len(problems)} machines of --provider {provider} none can be had; choose one with --machine"
        raise InputError(f"{problems[0]} ({others})")
    raise problems[0]


def _check_options(name: str, target: Target, provider: str, options: LaunchOptions) -> None:
    """What goes into scripts and manifests is a word, whoever wrote the command line."""
    for option in _WORDS:
        value = getattr(options, option)
        if value is not None and not WORD.fullmatch(value):
            raise InputError(f"--{option.replace('_', '-')} {value!r}: must be letters, digits and . : / @ - _ alone")
    if options.wheel is not None:
        if "wheel" not in target.FEATURES:
            remedy = "leave it out, or choose --provider tpu-vm"
            raise InputError(f"--wheel {options.wheel}: --provider {provider} runs a container; {remedy}")
        if options.image is not None:
            raise InputError("--wheel: does not go with --image; leave one out")
        check_wheel(options.wheel)
    check_service(target, provider, options)
    if not _NAME.fullmatch(name):
        rule = "must be 1 to 28 of a-z, 0-9 and -, begin with a letter and not end with -"
        raise InputError(f"--name {name}: {rule}; it names jobs, nodes and pods")
    stages, known = options.stages or (), (*STAGES, PREDICT)
    check_stage_names(stages, "--stages", known)
    if not stages or list(stages) != [stage for stage in known if stage in stages]:
        raise InputError(f"--stages {','.join(stages)}: must name stages in their order: {','.join(known)}")
    if not _BUCKET.fullmatch(options.bucket.rstrip("/")):
        rule = "must be gs://BUCKET or gs://BUCKET/FOLDER, and BUCKET 3 to 63 of a-z, 0-9, -, _ and ."
        raise InputError(f"--bucket {options.bucket}: {rule}")


def check_service(target: Target, provider: str, options: LaunchOptions) -> None:
    """Raises InputError for an option of the service where there is none."""
    given = {"--serve-machine": options.serve_machine, "--load": options.load, "--max-replicas": options.max_replicas}
    for option, value in given.items():
        if value is not None and "serves" not in target.FEATURES:
            remedy = "leave it out, or choose --provider cloud-run or gke"
            raise InputError(f"{option} {value}: --provider {provider} makes no service of the tuned model; {remedy}")
        if value is not None and "export" not in (options.stages or ()):
            what = "the service is of the merged weights, and --stages leaves export out"
            raise InputError(f"{option} {value}: {what}; leave {option} out, or add export")
        if value is not None and provider == "gke" and options.serve_machine is None:
            raise InputError(f"{option} {value}: needs --serve-machine, the service's machine, such as v6e-8 or 1xh100")
    if options.serve_machine is not None and provider == "cloud-run":
        what = "Cloud Run serves on an RTX PRO 6000 with 20 vCPU and 80 GiB, on no other"
        raise InputError(f"--serve-machine {options.serve_machine}: {what}; leave it out, or choose --provider gke")


def _find_rows(target: Target, options: LaunchOptions) -> str | None:
    """Those to answer. Raises InputError where nothing answers them, they do not exist, or tasks cannot share them."""
    stages, rows = options.stages or (), options.rows
    if (PREDICT in stages) != (rows is not None):
        raise InputError(f"--rows and --stages {PREDICT}: go together; give both, or neither")
    if options.tasks > 1 and (stages != (PREDICT,) or "tasks" not in target.FEATURES):
        what = f"only --provider cloud-run --stages {PREDICT}, without other stages, shares rows among tasks"
        raise InputError(f"--tasks {options.tasks}: {what}; leave it out")
    if rows is None or "://" in rows or rows.startswith("hub:"):
        return rows
    if not (path := expanduser(rows)).exists():
        raise InputError(f"--rows {rows}: does not exist; give a file or folder of rows, hub:… or gs://…")
    return str(path.absolute())


def _machines(recipe: Recipe, catalog: Catalog, target: Target, provider: str, options: LaunchOptions) -> list[Machine]:
    """Those to try, the cheapest first, where each would be rented; a price that is not known is told at its turn."""
    given = [machine for machine in catalog.machines.values() if target.gives(machine)]
    if options.machine is not None:
        machine = find_machine(catalog, options.machine)
        if target.gives(machine):
            return [machine]
        other = "it has " + ", ".join(machine.name for machine in given)
        if machine.slices > 1:
            other = "several slices are launched by --provider gke, each of two hosts or more, such as 2xv6e-16"
        raise InputError(f"--machine {machine.name}: --provider {provider} does not have it; {other}")
    asked = [find_machine(catalog, name) for name in recipe.hardware.machines]
    if not given:
        raise InputError(f"--provider {provider}: the catalog has no machine of it; add one in hardware.catalog")
    named = [machine for machine in asked if target.gives(machine)]

    def usd_per_hour(machine: Machine) -> float:
        with suppress(InputError):
            return find_price(machine, _region(machine, options), spot=options.spot).rate(spot=options.spot) or 0.0
        return math.inf

    return sorted(named if named and "machines" in recipe.hardware.model_fields_set else given, key=usd_per_hour)


def _request_on(
    machine: Machine,
    recipe: Recipe,
    derived: Sequence[ResolvedValue],
    inputs: LaunchInputs,
    *,
    root: str,
    provider: str,
    options: LaunchOptions,
) -> LaunchRequest:
    """The request for one machine. Raises InputError where it does not do, by the image, the plan or the catalog."""
    _check_image(machine, recipe, options)
    plan = plan_only(with_values(recipe, [("hardware.machines", (machine.name,))]))
    if not plan.machines[0].fits:
        raise RecipeError(f"--machine {machine.name}: does not fit by the plan: {plan.machines[0].notes[0]}")
    chosen, image = _choose(machine, root, provider, options)
    placed = [*inputs.placed, *_machine_keys(recipe, machine, root)]
    moved, derived_keys = with_values(recipe, placed), {item.key for item in derived}
    # A TPU VM is one attempt: its program starts again on the same node, within the same time.
    attempts = 1 if provider == "tpu-vm" else options.retries + 1
    bill = estimate_cost(machine, plan.machines[0], chosen, steps=plan.steps, attempts=attempts)
    return LaunchRequest(
        options=chosen,
        recipe=moved,
        recipe_text=dump_recipe(moved, [*derived, *placed]),
        inputs=inputs,
        machine=machine,
        plan=plan,
        variant=recipe_variant(recipe),
        bill=bill,
        root=root,
        image=image,
        max_model_len=None if "serve.max_model_len" in derived_keys else recipe.serve.max_model_len,
    )


def _check_image(machine: Machine, recipe: Recipe, options: LaunchOptions) -> None:
    if options.image is not None:
        return
    stages, gpu = options.stages or (), machine.chip.kind == "gpu"
    if not gpu and (served := [stage for stage in stages if stage in WITH_VLLM]):
        remedy = "run it after gemsmith launch fetch, or name an image of your own with --image"
        raise InputError(f"--stages {served[0]}: needs vLLM, which Gemsmith's image for TPUs does not have; {remedy}")
    if gpu and "train" in stages and recipe.train.backend == "tunix":
        remedy = "add --set train.backend=trl, or name an image of your own with --image"
        raise RecipeError(f"train.backend: tunix was given, but Gemsmith's image for GPUs trains with trl; {remedy}")
    if "train" in stages and (trackers := [name for name in recipe.train.report_to if name != "tensorboard"]):
        remedy = "add --set train.report_to=[tensorboard], or name an image of your own with --image"
        raise RecipeError(f"train.report_to: {trackers[0]} was given, which Gemsmith's images do not have; {remedy}")


def _choose(machine: Machine, root: str, provider: str, options: LaunchOptions) -> tuple[ChosenOptions, WithReason]:
    """The options with what was left to choose, and the image with its reason."""
    region, project = _region(machine, options), options.project
    if options.image is not None:
        image = WithReason(options.image, "--image")
    else:
        stack = "train-tpu" if machine.chip.kind == "tpu" else "train-gpu"
        stack += "-vllm" * (not WITH_VLLM.isdisjoint(options.stages or ()))
        where = f"{region}-docker.pkg.dev/{project}/gemsmith/{stack}:{__version__}"
        image = WithReason(where, f"docker/{stack}.Dockerfile, as docker/cloudbuild.yaml builds it")
    chosen = dict(options) | {
        "name": root.rpartition("/")[2],
        "machine": machine.name,
        "region": region,
        "image": None if options.wheel else image.value,
        "wheel": options.wheel and options.wheel.resolve(),
        "service_account": options.service_account or f"{_ACCOUNTS[provider]}@{project}.iam.gserviceaccount.com",
    }
    return ChosenOptions.model_validate(chosen), image


def _region(machine: Machine, options: LaunchOptions) -> str:
    if options.zone is not None:
        return options.zone.rpartition("-")[0]
    return options.region or default_region(machine, spot=options.spot) or ""


def _machine_keys(recipe: Recipe, machine: Machine, root: str) -> list[ResolvedValue]:
    keys = [ResolvedValue("hardware.machines", (machine.name,), "--machine")]
    if recipe.train.checkpoint_folder is not None or machine.hosts == 1:
        return keys
    if not BACKENDS[recipe.train.backend].buckets:
        what = f"saves to folders only, and {machine.name} has {machine.hosts} hosts that share none"
        remedy = "set it to tunix, or choose a machine of one host"
        raise RecipeError(f"train.backend: {recipe.train.backend} {what}; {remedy}")
    return [*keys, ResolvedValue("train.checkpoint_folder", f"{root}/checkpoints", "all hosts must see it")]


def _join(found: Sequence[LaunchRequest]) -> LaunchRequest:
    """The first request, with the other machines of its kind, the dearest one's bill and the longest time."""
    first = found[0]
    alike = [request for request in found if request.machine.chip.kind == first.machine.chip.kind]
    dearest = max((request.bill for request in alike), key=lambda bill: bill.usd_per_hour)
    longest = max((request.bill.timeout_s for request in alike), key=lambda timeout: float(timeout.value))
    bill = replace(dearest, timeout_s=longest, uncounted="a preemption begins an attempt that is not counted; ")
    return replace(first, others=tuple(alike[1:]), bill=bill)


def estimate_cost(
    machine: Machine, plan: MachinePlan, options: ChosenOptions, *, steps: int | None, attempts: int
) -> LaunchCost:
    """The bill of a launch. Raises InputError where the price, or how long it takes, is not known."""
    price, evaluates = find_price(machine, options.region, spot=options.spot), "eval" in options.stages
    rate = price.rate(spot=options.spot)
    assert rate is not None
    if options.timeout_hours is not None:
        timeout = WithReason(math.ceil(options.timeout_hours * 3600), f"--timeout-hours {options.timeout_hours:g}")
    elif PREDICT in options.stages:
        remedy = "give the hours after which an attempt is to be ended; the next one asks only for what is missing"
        raise InputError(f"--timeout-hours: is missing, and nothing tells how long answers take; {remedy}")
    elif steps is None or plan.hours is None:
        what = "the plan cannot tell how many steps there are before the rows are read"
        remedy = "give the hours after which an attempt is to be ended, or train.max_steps"
        raise InputError(f"--timeout-hours: is missing, and {what}; {remedy}")
    else:
        most, beside_s = plan.hours[1], BEFORE_AND_AFTER_S + (EVAL_S if evaluates else 0)
        timeout = WithReason(
            math.ceil((SLACK * most * 3600 + beside_s) / 600) * 600,
            f"{SLACK:g} x the {most:.3g} h that the plan gives at most, and {beside_s // 3600} h for weights, "
            f"compilation, {'export, verify and eval' if evaluates else 'export and verify'}; --timeout-hours sets "
            "another",
        )
    return LaunchCost(
        usd_per_hour=rate * options.tasks,
        price=f"{price.source}, {price.date}{'' if price.checked else ', not checked'}",
        hours=plan.hours if steps is not None else None,
        timeout_s=timeout,
        attempts=attempts,
    )


def is_googles(machine: Machine) -> bool:
    """Whether Google rents it: the catalog has no price of it, or not only those of others."""
    return not machine.prices or any(price.provider == GCP for price in machine.prices)


def find_price(machine: Machine, region: str, *, spot: bool) -> Price:
    """The machine's price in a region, or in all of its area (us). Raises InputError with those that have one."""
    kind = "spot" if spot else "on-demand"
    there = {price.region: price for price in machine.prices if price.provider == GCP and price.rate(spot=spot)}
    if found := there.get(region) or there.get(region.partition("-")[0]):
        return found
    if not there:
        what = f"the catalog has no {kind} price of it at Google, so its greatest bill is not known"
        raise InputError(f"--machine {machine.name}: {what}; add one in hardware.catalog")
    has = ", ".join(f"{name} ({price.rate(spot=spot):.2f} USD/h)" for name, price in there.items())
    if not region:
        raise InputError(f"--region: is missing; the catalog's {kind} price of {machine.name} is of {has}; name one")
    what = f"the catalog has no {kind} price of {machine.name} there; it has {has}"
    raise InputError(f"--region {region}: {what}; choose one, or add the region in hardware.catalog")


def default_region(machine: Machine, *, spot: bool) -> str | None:
    """The cheapest region that the catalog has a price for; None where it knows prices of whole areas alone."""
    known = (price for price in machine.prices if price.provider == GCP and "-" in price.region)
    rates = {price.region: rate for price in known if (rate := price.rate(spot=spot))}
    return min(rates, key=rates.__getitem__, default=None)
