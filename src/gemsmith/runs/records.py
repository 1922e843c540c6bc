"""What each stage writes into the run directory, to and from JSON. Scripts rely on the field names.

Units are in the names: `_s` seconds, `_ms` milliseconds, `_bytes`, `usd`.
"""

import json
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemsmith.errors import RunError, VersionError
from gemsmith.system.files import regular_file
from gemsmith.system.version import __version__

SCHEMA_VERSION = 1
Range = tuple[float, float]  # low, high


class Part(BaseModel):
    # Deferred: a command uses a record or two, and building the checks of all of them takes 20 ms of each start.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Computer(Part):
    """The computer a stage ran on."""

    system: str
    processor: str
    cores: int
    memory_bytes: int
    accelerators: tuple[str, ...] = ()  # only training's record names them

    def is_computer_of(self, other: "Computer") -> bool:
        """Whether it is the same computer, whichever of the two records names its accelerators."""
        return self.model_copy(update={"accelerators": other.accelerators}) == other


class Provenance(Part):
    """When, where and from what a record was made: the same in every record."""

    started: str  # UTC, ISO 8601
    duration_s: float
    gemsmith: str
    versions: dict[str, str]
    machine: Computer
    seed: int
    inputs_sha256: dict[str, str]  # what the stage read -> its SHA-256


class Record(Part):
    """Base of the stages' records. `status` is `complete` only once the stage has ended well."""

    stage: ClassVar[str]
    schema_version: int = SCHEMA_VERSION
    status: Literal["complete"] = "complete"
    provenance: Provenance
    warnings: tuple[str, ...] = ()
    """What a reader must know before the numbers, a sentence each: printed, and at the top of the page."""
    critical_warnings: tuple[str, ...] = ()  # the same, where a result must not be used as it is


class HeldOut(Part):
    """The rows that data.eval named, compared with what is trained on: exactly, but for white space."""

    rows: int
    same_prompt: int  # rows whose prompt, images included, is trained on
    same_answer: int  # of these, those whose answer is the trained one
    same_image: int | None = None
    """Rows with an image whose file's bytes are trained on, whatever the prompt; None where no row has images."""


class ImageBucket(Part):
    """Steps of the JAX backend whose rows all have room for as many images; one compiled program runs them."""

    images: int  # of a row
    soft_tokens: int  # of each of these at most
    steps: int
    padding_fraction: float | None = None
    """Of the patches that went through the model in these steps, the share that is padding; None before training."""


class EvalRows(Part):
    """The rows of data.eval as training measures its loss on them, packed as those that are trained on."""

    rows: int
    dropped: dict[str, int]  # why -> rows, as of those that are trained on
    packed_rows: int
    tokens: int
    supervised_tokens: int
    rows_sha256: str
    files: dict[str, str]


class DataRecord(Record):
    stage: ClassVar[str] = "data"
    rows: int  # documents that are trained on
    dropped: dict[str, int]
    """Why -> rows: too_long, too_many_patches, limit, held_out, or `row` or `image` and what is wrong with it."""
    ignored_columns: dict[str, int] = {}  # columns that were not read -> rows that have a value there
    sources: dict[str, int] = {}  # where data.train names several: source -> rows that were taken of it, by its weight
    packed_rows: int
    tokens: int
    supervised_tokens: int
    packing_efficiency: float  # real tokens over all positions of the packed rows
    packing_order: Literal["longest first", "drawn"] | None = None
    """`drawn`: by the seed, for a folder of images, which is read class by class. None: one document a row."""
    length_percentiles: dict[str, int]  # p50, p90, p99, p100 of documents' tokens, dropped ones counted
    template_sha256: str
    steps: int
    rows_sha256: str
    """Of the SHA-256s of the arrays' files, one after the other, and of the images of each row, wherever they lie."""
    files: dict[str, str] = {}  # array -> SHA-256 of its file
    held_out_also_trained: int | None = None
    """Rows that data.eval named then whose prompt is also trained on; None where it named none."""
    held_out: HeldOut | None = None
    eval_rows: EvalRows | None = None  # None without train.eval_steps
    images: int = 0  # places of images in the documents that are trained on; an image in two of them counts twice
    soft_tokens: int = 0  # of these, and part of `tokens`
    most_patches: int = 0  # patches of a packed row at most
    most_images: int = 0  # images of a packed row at most
    buckets: tuple[ImageBucket, ...] = ()
    """What the JAX backend pads the images of a step's rows to, the smallest first, with the steps of each."""


class TrainStep(Part):
    # JSON has no NaN; as text it comes back as the number that it was.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    step: int  # from 1
    loss: float  # mean over the step's tokens in the loss
    grad_norm: float  # before clipping
    learning_rate: float  # the one this step's update used
    real_tokens: int  # tokens that are not padding
    loss_tokens: int | None = None  # of these, the tokens in the loss
    token_accuracy: float | None = None
    """The share of the tokens in the loss that have the highest logit, before the update."""
    step_s: float
    spike: bool = False  # the loss was more than train.spike_factor times the median of the steps before
    grad_norm_spike: bool = False
    """The gradient norm was more than train.grad_norm_spike_factor times the median of the steps before."""
    skipped: bool = False  # the step's update was left out
    images: int = 0
    soft_tokens: int = 0  # of the images; part of `real_tokens`


class SampleAnswer(Part):
    """What the model answered greedily to the prompt of a held-out row."""

    prompt: str  # as the model reads it; of a long one the last 1,000 characters, of an image one soft token
    expected: str  # up to 64 tokens, as of the answer; what goes on ends with …
    answer: str


class Evaluation(Part):
    """The held-out rows after a step, with the adapters as it left them and without dropout."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    step: int
    loss: float  # mean over the tokens in the loss of all rows
    token_accuracy: float  # the share of these tokens that have the highest logit
    loss_tokens: int
    s: float  # in no step's step_s
    answers: tuple[SampleAnswer, ...] = ()  # those of train.sample_answers


class Extension(Part):
    """A training was given other steps in all: those up to `after` have the learning rates of `planned_steps`."""

    after: int
    planned_steps: int
    steps: int


class TrainImages(Part):
    seen: int  # images of the rows of all steps; those of a row that was trained on twice count twice
    soft_tokens: int
    per_s: float  # over the steps but the first, which compiles
    padding_fraction: float  # of the patches that went through the model, the share that is padding
    buckets: tuple[ImageBucket, ...] = ()
    """Those of the steps that were run, the smallest first; each is a compiled program. None with another backend."""


class TrainSaves(Part):
    """The checkpoints that the last start saved."""

    number: int
    s: float  # that training waited for all of them; what is written beside its steps is not in it
    bytes: int  # of the arrays of all of them


class AgainstPlan(Part):
    """What plan.json said of a step on the machine that trained, and what its steps took."""

    machine: str
    planned_step_s: Range
    step_s: float  # median
    steps: int  # all but the first of each start, which warms up


class TrainRecord(Record):
    stage: ClassVar[str] = "train"
    backend: str
    model: str
    steps: tuple[TrainStep, ...]
    early_stop: str | None = None  # why training ended before its planned steps; None where it did not
    evaluations: tuple[Evaluation, ...] = ()  # after every train.eval_steps and the last step
    warmup_steps: int | None = None  # what warm-up came to
    adapted: dict[str, int]
    trained_parameters: int
    base_dtype: str | None = None  # what the frozen base was held in, train.dtype
    mesh: dict[str, int]
    attention: dict[str, str] = {}  # what computed attention, by type of layer, where the backend can tell
    remat: str | tuple[str, ...] = "layer"  # what train.remat came to on these devices
    resumed_at: tuple[int, ...] = ()  # steps after which the run was continued from a checkpoint
    extensions: tuple[Extension, ...] = ()
    spikes: tuple[int, ...] = ()
    grad_norm_spikes: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    """Steps whose update was left out, since loss or gradient norm was a spike, or NaN or infinite."""
    hosts: int = 1
    machine: str | None = None
    """The catalog's that has these accelerators, of several the one that the recipe plans for; None: not just one."""
    compile_s: float = 0.0  # of the last start: tracing and compiling the step, or taking it from the cache
    compiled_from_cache: bool = False
    real_tokens_per_s: float  # over the steps but the first, which compiles
    against_plan: AgainstPlan | None = None
    """None where there was no plan of this recipe, or it did not have this machine."""
    peak_memory_bytes: int
    last_checkpoint: str = Field(pattern=r"(^|/)[0-9]{1,9}$")  # the saved step that export takes
    kept: Literal["last", "best"] = "last"  # which step that is
    saves: TrainSaves | None = None
    images: TrainImages | None = None  # None where the rows are text alone


class FileSum(Part):
    name: str
    bytes: int
    sha256: str


class ExportRecord(Record):
    stage: ClassVar[str] = "export"
    source: str = "run"  # where the adapter came from: `run`, or the PEFT folder or Tunix checkpoint that was given
    step: int | None  # the saved step, where it came from one
    base: str = ""
    base_sha256: str = ""  # the base's fingerprint; that of the one trained on is compared with it where it is known
    adapter: tuple[FileSum, ...]
    merged: tuple[FileSum, ...]
    merged_into: Literal["trained", "original"] = "original"
    """The weights that were trained on, dequantized where they were quantized, or the base's own."""
    merged_tensors: int
    copied_tensors: int


class Check(Part):
    name: str
    passed: bool | None  # None: could not be done here, which is no pass; the detail says why
    detail: str


class Losses(Part):
    """Mean loss of the same trained targets: of the base as training held it, that with the adapter, and merged/."""

    base: float
    trained: float
    exported: float
    targets: int


class VerifyRecord(Record):
    stage: ClassVar[str] = "verify"
    passed: bool
    checks: tuple[Check, ...]
    changed_tensors: int
    expected_tensors: int
    logits_max_abs_difference: float | None
    """Merged against base + adapter, rounded to the base's dtype as merged is; None: not computed, as a check says."""
    logits_effect: float | None = None  # the most that base + adapter differs from the base
    logits_rounding: float | None = None
    """The most that merged differs from base + adapter as it is, without the rounding to the base's dtype."""
    losses: Losses | None = None  # None: not measured
    rounding_loss: float | None = None
    """Norm of what that rounding took from the adapter's changes over theirs: 0 nothing, 1 all; None: not computed."""


class ServerFacts(Part):
    """What a running vLLM said of itself; None: it could not be read, which `unread` lists."""

    version: str | None = None
    dtype: str | None = None
    quantization: str | None = None  # `none` where the weights are served as they are
    kv_cache_dtype: str | None = None  # `auto`: that of the weights
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    max_model_len: int | None = None
    chunked_prefill: bool | None = None
    prefix_caching: bool | None = None
    kv_blocks: int | None = None
    kv_block_tokens: int | None = None
    kv_cache_tokens: int | None = None  # what all blocks hold together, sliding windows considered
    unread: tuple[str, ...] = ()


class ServeRecord(Record):
    stage: ClassVar[str] = "serve"
    url: str
    model: str
    command: tuple[str, ...]
    start_s: float
    vllm: str
    answer: str  # what the server answered to a first prompt
    weights: Literal["merged", "adapter"] = "merged"
    adapter_effect: float | None = None
    """The most that a first answer's log-probability differs between base and adapter; None for merged weights."""
    server: ServerFacts | None = None


RecordT = TypeVar("RecordT", bound=Record)
PartT = TypeVar("PartT", bound=Part)


def read_record_file(file: Path, kind: type[PartT], *, missing: str, damaged: str) -> PartT:
    """The record in a file. Raises RunError with what to do where it is missing or damaged; VersionError."""
    try:
        text = regular_file(file).read_bytes()
    except FileNotFoundError:
        raise RunError(f"{file}: does not exist; {missing}") from None
    _refuse_another_version(file, text)
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise RunError(f"{file}: is not a record of this version ({place}{first['msg']}); {damaged}") from None


def _refuse_another_version(file: Path, text: bytes) -> None:
    """Raises VersionError where a record says that it is one; what is not JSON says nothing."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return
    version = content.get("schema_version", SCHEMA_VERSION) if isinstance(content, dict) else SCHEMA_VERSION
    if version == SCHEMA_VERSION:
        return
    provenance = content.get("provenance")
    writer = provenance.get("gemsmith") if isinstance(provenance, dict) else None
    named = isinstance(writer, str) and writer != __version__
    program = f"Gemsmith {writer}" if named else "the Gemsmith that wrote it"
    why = f"has schema_version {json.dumps(version)}, this Gemsmith {__version__} reads {SCHEMA_VERSION}"
    raise VersionError(f"{file}: {why}; open it with {program}, or start anew in another directory")
