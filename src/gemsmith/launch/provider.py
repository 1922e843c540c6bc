"""What a provider of machines must offer, and what it is given: a launch as asked, with everything chosen, and kept.

This machine remembers a launch in launches/NAME/launch.json, beside the files that were submitted.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import BeforeValidator, Field, ValidationError

from gemsmith.arch import Variant
from gemsmith.errors import InputError, suggest
from gemsmith.hardware import Machine
from gemsmith.launch.shards import ImageShards
from gemsmith.recipe.schema import Recipe, ResolvedValue
from gemsmith.runs.plan_records import PlanRecord
from gemsmith.runs.records import SCHEMA_VERSION, Part
from gemsmith.runs.stages import SERVED, STAGES
from gemsmith.system.files import write_text

LAUNCHES = Path("launches")
LABEL = "gemsmith-run"  # the label that everything created carries; its value is the launch's name
MOUNT = "/mnt/weights"  # where a machine sees the bucket with the base, if its target mounts it
STAGES_THERE = tuple(stage for stage in STAGES if stage not in SERVED)
"""What every image can run; vLLM, which the others need, is in that for GPUs alone that has it in its name."""
PREDICT = "predict"  # the last of a launch's stages, though none of a run's: it answers the rows of --rows
WITH_VLLM = {*SERVED, PREDICT}
READERS_OF_MERGED = {"verify", *WITH_VLLM}
"""Stages for which the merged weights are fetched, which are as large as the model."""
WORD = re.compile(r"[\w.:/@-]+")  # what stands in scripts, manifests and commands, whoever wrote it
Command = tuple[str, ...]


# What --stages says, such as a,b -> (a, b).
_Stages = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda text: tuple(filter(None, text.split(","))) if isinstance(text, str) else text),
]


class LaunchOptions(Part):
    """The options of gemsmith launch, whose help explains them; None is chosen for the launch, or left out."""

    name: str | None = None
    machine: str | None = None
    stages: _Stages | None = None
    bucket: str
    project: str
    region: str | None = None
    zone: str | None = None
    image: str | None = None
    wheel: Path | None = None
    service_account: str | None = None
    secret: str | None = None
    spot: bool = False
    network: str | None = None
    subnet: str | None = None
    timeout_hours: float | None = None
    retries: int = 3
    cluster: str | None = None
    queue: str | None = None
    serve_machine: str | None = None
    load: Literal["mount", "stream"] | None = None
    max_replicas: int | None = None
    overrides: tuple[str, ...] = ()
    rows: str | None = None
    tasks: int = 1
    sampling: Mapping[str, float | int | str | None] = Field(default_factory=dict)
    """How: what gemsmith predict calls `model`, and the fields of SamplingParams."""


class ChosenOptions(LaunchOptions):
    """The options with those filled in that were left to choose."""

    name: str
    machine: str
    stages: tuple[str, ...]
    region: str
    service_account: str


class LaunchRecord(ChosenOptions):
    """A launch: where it went, and all that status, logs, fetch, stop and clean need to find it again."""

    schema_version: int = SCHEMA_VERSION
    state: Literal["submitting", "submitted", "failed", "cleaned"]  # `submitting` and `failed`: some of it may be there
    target: str
    root: str  # gs://bucket/folder/NAME
    usd_per_hour: float
    max_usd: float
    started: str  # UTC, ISO 8601
    gemsmith: str
    files: dict[str, str]  # rendered file -> SHA-256


def write_launch(record: LaunchRecord) -> None:
    """Writes the record whole or not at all."""
    file = LAUNCHES / record.name / "launch.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, record.model_dump_json(indent=1) + "\n")


def read_launch(name: str) -> LaunchRecord:
    """The record of a launch. Raises InputError with the names that there are, or for one that is damaged."""
    file = LAUNCHES / name / "launch.json"
    try:
        return LaunchRecord.model_validate_json(file.read_bytes())
    except OSError:
        names = sorted(file.parent.name for file in LAUNCHES.glob("*/launch.json"))
        there = f"there are: {', '.join(names)}" if names else "there are none in this folder"
        raise InputError(f"launch {name}: {file} does not exist{suggest(name, names)}; {there}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"is not a launch's record of this version ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        raise InputError(f"{file}: {what}; open it with the Gemsmith that wrote it") from None


class WithReason(NamedTuple):
    """A value that was chosen, and why; in a rendered file the reason is a comment behind it."""

    value: str | int | float | bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class LaunchCost:
    """What a launch costs."""

    usd_per_hour: float
    price: str  # where the price is from
    hours: tuple[float, float] | None  # of training, by the plan; None where the number of steps is not known
    timeout_s: WithReason  # after which one attempt is ended
    attempts: int
    uncounted: str = ""  # what can cost more than the greatest bill, as a clause

    @property
    def usd(self) -> tuple[float, float] | None:
        return self.hours and (self.hours[0] * self.usd_per_hour, self.hours[1] * self.usd_per_hour)

    @property
    def max_usd(self) -> float:
        """Every attempt runs into its timeout."""
        return float(self.timeout_s.value) / 3600 * self.attempts * self.usd_per_hour


@dataclass(frozen=True, kw_only=True)
class LaunchInputs:
    """What a launch brings along."""

    placed: tuple[ResolvedValue, ...] = ()  # keys of the recipe that name another place there
    copies: Mapping[str, str]  # a local file or folder -> where it goes, below the run's folder in the bucket
    rows: str | None = None  # where the machine finds those to answer
    images: tuple[ImageShards, ...] = ()  # those that rows name, which are packed for the way
    weights_bucket: str | None = None  # the bucket of the base, where it is mounted: the machine reads it in place


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A launch that was asked for, with everything chosen for it; rendering needs nothing else."""

    options: ChosenOptions
    recipe: Recipe  # as the machine reads it
    recipe_text: str
    inputs: LaunchInputs
    machine: Machine
    others: tuple["LaunchRequest", ...] = ()
    """Of further machines of its kind that fit, for a target that takes whichever it gets; `bill` is the dearest's."""
    plan: PlanRecord  # for the machine alone
    variant: Variant
    bill: LaunchCost
    root: str  # gs://bucket/folder/NAME: all that the launch reads and writes
    image: WithReason
    max_model_len: int | None
    """serve.max_model_len where the user gave it; None: the recipe's is what eval and bench need."""

    @property
    def bucket(self) -> str:
        return self.root.removeprefix("gs://").partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class PreflightCheck:
    """One line of the preflight: a command that must succeed, and what to do where it does not."""

    name: str
    command: Command
    remedy: str
    complaint: Callable[[str], str | None] = lambda _output: None
    """What is wrong with the command's output; None where nothing is."""
    needed: bool = True  # where not, a failure is told and does not stop the launch


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A kind of thing that a launch creates: how its names are listed, and how one of them is removed."""

    kind: str
    list: Command  # prints a name a line
    remove: Command  # `{}` stands for the name


Feature = Literal["mounts weights", "any machine", "evaluates", "wheel", "tasks", "serves"]
"""What not every target can do: read a base in a bucket in place, below MOUNT; take whichever it gets of several
machines that fit; end with eval, where it is not told what to do and rows are held out; install Gemsmith's wheel in
place of a container; share rows among tasks; serve the tuned model."""


class Target(Protocol):
    """Where a launch goes. Modules are targets: cloud_run, tpu_vm, gke and skypilot."""

    FEATURES: frozenset[Feature]

    def gives(self, machine: Machine) -> bool:
        """Whether the target has such machines."""

    def check(self, request: LaunchRequest) -> None:
        """Raises InputError for what the target cannot do with a machine that it gives."""

    def render(self, request: LaunchRequest) -> dict[str, str]:
        """File name -> text; `submit.sh` is what submitting runs."""

    def values(self, request: LaunchRequest) -> dict[str, Any]:
        """What commands.yaml names of the target beside the options, such as its `api`."""
