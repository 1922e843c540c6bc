"""What a target is: pure functions from a request to files, and from a launch's record to commands.

What this machine remembers of a launch: launches/NAME/launch.json, beside the files that were submitted.

A folder with Gemsmith's wheel and its locks: what uv installs on a machine where no container image is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from pydantic import ValidationError

from gemsmith.arch import Variant
from gemsmith.errors import InputError, suggest
from gemsmith.hardware import Machine
from gemsmith.launch.shards import ImageShards
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.plan_records import MachinePlan
from gemsmith.runs.records import SCHEMA_VERSION, Part
from gemsmith.system.files import write_text
from gemsmith.system.version import __version__

LAUNCHES = Path("launches")


class LaunchRecord(Part):
    """A launch: where it went, and all that status, logs, fetch, stop and clean need to find it again."""

    schema_version: int = SCHEMA_VERSION
    name: str
    state: Literal["submitting", "submitted", "failed", "cleaned"]
    """`submitting` and `failed`: some of it may be there."""
    target: str
    machine: str
    project: str
    region: str
    zone: str | None
    cluster: str | None = None
    root: str
    """gs://bucket/folder/NAME."""
    stages: tuple[str, ...]
    image: str | None
    """None where uv's Python is used in place of one."""
    secret: str | None
    service_account: str
    spot: bool
    usd_per_hour: float
    max_usd: float
    started: str
    """UTC, ISO 8601."""
    gemsmith: str
    files: dict[str, str]
    """Rendered file -> SHA-256."""


def launch_folder(name: str) -> Path:
    return LAUNCHES / name


def write_launch(record: LaunchRecord) -> None:
    """Writes the record whole or not at all."""
    folder = launch_folder(record.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "launch.json", record.model_dump_json(indent=1) + "\n")


def read_launch(name: str) -> LaunchRecord:
    """The record of a launch. Raises InputError with the names that there are, or for one that is damaged."""
    file = launch_folder(name) / "launch.json"
    try:
        return LaunchRecord.model_validate_json(file.read_bytes())
    except OSError:
        names = known_launches()
        there = f"there are: {', '.join(names)}" if names else "there are none in this folder"
        raise InputError(f"launch {name}: {file} does not exist{suggest(name, names)}; {there}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(
            f"{file}: is not a launch's record of this version ({'.'.join(map(str, first['loc']))}: {first['msg']}); "
            "open it with the Gemsmith that wrote it"
        ) from None


def known_launches() -> list[str]:
    return sorted(file.parent.name for file in LAUNCHES.glob("*/launch.json"))


Command = tuple[str, ...]
LABEL = "gemsmith-run"
"""The label that everything created carries; its value is the launch's name."""
MOUNT = "/mnt/weights"
"""Where a machine sees the bucket with the base, if its target mounts it."""


class WithReason(NamedTuple):
    """A value that was chosen, and why; in a rendered file the reason is a comment behind it."""

    value: str | int | float | bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class LaunchCost:
    """What a launch costs."""

    usd_per_hour: float
    price: str
    """Where the price is from."""
    hours: tuple[float, float] | None
    """Of training, by the plan; None where the number of steps is not known."""
    timeout_s: WithReason
    """After which one attempt is ended."""
    attempts: int
    uncounted: str = ""
    """What can cost more than the greatest bill, as a clause."""

    @property
    def usd(self) -> tuple[float, float] | None:
        return self.hours and (self.hours[0] * self.usd_per_hour, self.hours[1] * self.usd_per_hour)

    @property
    def max_usd(self) -> float:
        """Every attempt runs into its timeout."""
        return float(self.timeout_s.value) / 3600 * self.attempts * self.usd_per_hour


@dataclass(frozen=True, kw_only=True)
class Request:
    """A launch that was asked for, with everything chosen for it; rendering needs nothing else."""

    name: str
    recipe: Recipe
    """As the machine reads it."""
    recipe_text: str
    inputs: Mapping[str, str]
    """A local file or folder -> where it goes, below the run's folder in the bucket."""
    images: tuple[ImageShards, ...] = ()
    """Those that rows name, which are packed for the way."""
    stages: tuple[str, ...]
    machine: Machine
    others: tuple["Request", ...] = ()
    """Of further machines of its kind that fit, for a target that takes whichever it gets; the bill is the dearest's.
    """
    plan: MachinePlan
    variant: Variant
    parameters: int
    trained_parameters: int
    bill: LaunchCost
    project: str
    region: str
    zone: str | None
    root: str
    """gs://bucket/folder/NAME: all that the launch reads and writes."""
    image: WithReason
    python: Path | None
    """A folder with Gemsmith's wheel and locks, which uv installs in place of the image."""
    service_account: str
    secret: str | None
    """Of Secret Manager, the Hugging Face token; None: the checkpoint is public, or not from there."""
    max_model_len: int | None
    """serve.max_model_len where the user gave it; None: the recipe's is what eval and bench need."""
    spot: bool
    network: str | None
    subnet: str | None
    queue: str | None
    """Kueue's local queue."""
    cluster: str | None
    """Of Kubernetes."""
    weights_bucket: str | None
    """The bucket whose weights the machine reads in place, where the target can mount it."""

    @property
    def bucket(self) -> str:
        return self.root.removeprefix("gs://").partition("/")[0]

    @property
    def labels(self) -> dict[str, str]:
        return {LABEL: self.name}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the preflight: a command that must succeed, and what to do where it does not."""

    name: str
    command: Command
    remedy: str
    complaint: Callable[[str], str | None] = lambda _output: None
    """What is wrong with the command's output; None where nothing is."""
    needed: bool = True
    """Where not, a failure is told and does not stop the launch."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A kind of thing that a launch creates: how its names are listed, and how one of them is removed."""

    kind: str
    list: Command
    """Prints a name a line."""
    remove: Command
    """`{}` stands for the name."""


class Target(Protocol):
    """Where a launch goes. Modules are targets: cloud_run, tpu_vm, gke and sky."""

    MOUNTS_WEIGHTS: bool
    """Whether a base in a bucket is read in place, below MOUNT."""

    SUPPORTS_ANY_MACHINE: bool
    """Whether it takes whichever it gets of several machines that fit."""

    SUPPORTS_WHEEL: bool
    """Whether Gemsmith's wheel can be installed on it, in place of a container."""

    def gives(self, machine: Machine) -> bool:
        """Whether the target has such machines."""

    def check(self, request: Request) -> None:
        """Raises InputError for what the target cannot do with a machine that it gives."""

    def render(self, request: Request) -> dict[str, str]:
        """File name -> text; `submit.sh` is what submitting runs."""

    def preflight(self, request: Request) -> list[Check]:
        """What must be there before anything is created."""

    def status(self, record: LaunchRecord) -> Command:
        """A command that prints how the launch is doing."""

    def logs(self, record: LaunchRecord) -> Command:
        """A command that prints what the launch has said."""

    def running(self, record: LaunchRecord) -> tuple[Resource, ...]:
        """What `stop` removes: all that costs money while it is there."""

    def created(self, record: LaunchRecord) -> tuple[Resource, ...]:
        """What `clean` removes."""


LOCKS = ("train.lock", "tpu.lock", "gcs.lock")
PLACE = "python"
"""Where its files are, below the run's folder in the bucket."""
WHEEL = f"gemsmith-{__version__}-py3-none-any.whl"
_MAKE = "make build/python in Gemsmith's sources makes such a folder"


def check_wheel(folder: Path) -> None:
    """Raises InputError unless the folder has the wheel of this version, no other wheel, and the locks."""
    if not folder.is_dir():
        raise InputError(f"--python {folder}: is no folder; {_MAKE}")
    wheels = sorted(path.name for path in folder.glob("*.whl"))
    if wheels != [WHEEL]:
        found = f"has {', '.join(wheels)}" if wheels else "has no wheel"
        raise InputError(f"--python {folder}: {found}; it must have {WHEEL} alone; {_MAKE}")
    if missing := [name for name in LOCKS if not (folder / name).is_file()]:
        raise InputError(f"--python {folder}: has no {missing[0]}; {_MAKE}")


def upload_wheel(folder: Path, root: str) -> tuple[str, Command]:
    """Reason and command of the copy to the bucket."""
    files = [str(folder / name) for name in (WHEEL, *LOCKS)]
    return "Gemsmith's wheel and its locks, which uv installs there.", (
        *("gcloud", "storage", "cp", *files),
        f"{root}/{PLACE}/",
    )
