"""The recipe: one YAML that every stage reads. Its keys, their defaults, and which of them exclude each other.

Defaults live here and nowhere else; where arXiv 2605.25645 gives a value, it is that one.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gemsmith.errors import RecipeError
from gemsmith.execution import BACKENDS, NAMES, Saved, Tuned
from gemsmith.tasks import MADE, SCORERS, describe_made, describe_scorers
from gemsmith.zoo import LORA_KINDS, find_variant, lora_targets, variant_of_hub_id

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
if TYPE_CHECKING:
    MadeTask: TypeAlias = str
    ScorerName: TypeAlias = str
else:  # the names of the tasks that there are
    MadeTask, ScorerName = Literal[MADE], Literal[SCORERS]
# YAML 1.1, which PyYAML reads, takes a bare off for false.
AutoOrOff = Annotated[Tuned, BeforeValidator(lambda value: "off" if value is False else value)]

ADDED_LATER = frozenset({"train.tuned"})
"""Keys that recipes of earlier versions lack. At its default such a key is left out of what says how a stage was made,
so that what those versions made stays complete and can be gone on with."""


class Section(BaseModel):
    """Base of every part of the recipe: frozen, and unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, str_min_length=1)


class Made(Section):
    """Rows made by a seeded generator that ships with Gemsmith, instead of a file."""

    task: MadeTask = Field(description=f"The generator: {describe_made()}.")
    rows: Positive = Field(description="How many rows to make.")
    split: Literal["train", "held-out"] = Field("train", description="The two splits share no specification.")


class Data(Section):
    train: str | Made = Field(description="JSONL or parquet file, a Hugging Face dataset folder, or rows to make.")
    eval: str | Made | None = Field(None, description="Held-out rows, in the same forms; null: no evaluation.")
    format: Literal["auto", "messages", "prompt-response"] = Field("auto", description="`auto` looks at the columns.")
    template: str | None = Field(None, description="A chat template file; default: the checkpoint's own.")
    max_length: Positive = Field(4096, description="Tokens in a row, packed or not.")
    packing: bool = Field(
        True, description="Several documents in a row, kept apart by segments; never a document over two rows."
    )
    too_long: Literal["drop", "error"] = Field("drop", description="What happens to a document longer than max_length.")


def lora_scale(*, rank: int, alpha: float, rslora: bool) -> float:
    """What B A is multiplied by; rsLoRA: https://arxiv.org/abs/2312.03732.

    >>> lora_scale(rank=16, alpha=32.0, rslora=False), lora_scale(rank=16, alpha=32.0, rslora=True)
    (2.0, 8.0)
    """
    return alpha / (math.sqrt(rank) if rslora else rank)


class Lora(Section):
    rank: Positive = 64
    alpha: Annotated[float, Field(gt=0)] = 64.0
    dropout: Fraction = 0.05
    rslora: bool = Field(False, description="Scale adapters by alpha / sqrt(rank) instead of alpha / rank.")
    targets: tuple[str, ...] = Field(LORA_KINDS, description="Kinds of projection that get an adapter.", strict=False)

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return lora_scale(rank=self.rank, alpha=self.alpha, rslora=self.rslora)


class Optimizer(Section):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="After warm-up; cosine and linear end at 0."
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Default, where there is no warmup_ratio: a tenth of all updates, rounded down, at most 100."
    )
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Instead of warmup_steps: their share of all updates, rounded up."
    )
    weight_decay: Annotated[float, Field(ge=0)] = 0.001
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(1.0, description="Global gradient norm; null: no clipping.")
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Annotated[float, Field(gt=0)] = 1e-8

    def warmup(self, updates: int) -> int:
        """The steps of warm-up, of so many updates.

        >>> [Optimizer().warmup(updates) for updates in (9, 19, 5000)]
        [0, 1, 100]
        """
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * updates)
        # Rounded down, since the first step of a warm-up has the rate 0: of a few steps none is to be lost.
        return min(100, updates // 10) if self.warmup_steps is None else self.warmup_steps


class Mesh(Section):
    replica: Positive = Field(1, description="Copies of the weights; each takes its share of the rows.")
    fsdp: Positive = Field(1, description="Splits rows, and the weights by the model's width.")
    sequence: Positive = Field(1, description="Splits every row's positions, and the weights like fsdp.")
    tp: Positive = Field(1, description="Splits heads, hidden units and the vocabulary.")


class Train(Section):
    backend: Literal["tunix", "trl"] = Field("tunix", description="JAX on TPU, GPU or CPU; or TRL on GPU.")
    start_adapter: str | None = Field(
        None, description="A folder of a PEFT adapter whose matrices training starts from."
    )
    epochs: Positive = 1
    optimizer_steps: Positive | None = Field(
        None,
        description="Updates; rows repeat in further epochs where there are fewer than they need. Default: epochs "
        "decide.",
    )
    rows_per_step: Positive = Field(8, description="Rows of max_length in one optimizer step, over all devices.")
    tokens_per_step: Positive | None = Field(
        None, description="Instead of rows_per_step: positions in one step, padding counted."
    )
    micro_batches: Positive = Field(
        1,
        description="Parts of a step, run one after the other for less memory; the update is the same. JAX on CPU "
        "takes row by row.",
    )
    attention: Literal["auto", "splash", "dense", "documents", "sdpa", "eager"] = Field(
        "auto",
        description="tunix: the `splash` kernel on TPU, for heads of whole 128s; `dense` blocks elsewhere. trl: "
        "`documents` one by one, "
        "or masked `sdpa`, `eager`.",
    )
    remat: Literal["auto", "none", "layer"] | Annotated[tuple[Saved, ...], Field(strict=False)] = Field(
        "auto",
        description="What the backward pass recomputes: `none`, a whole `layer`, or all of it but the results "
        "named here; "
        "`auto` names as many as the device has room for.",
    )
    offload: Annotated[tuple[Saved, ...], Field(strict=False)] = Field(
        (), description="Results of a layer that wait for the backward pass in the host's memory; TPU and GPU."
    )
    mesh: Literal["auto"] | Mesh = "auto"
    dtype: Literal["bfloat16", "float32", "nf4", "int8"] = Field(
        "bfloat16",
        description="Of the frozen base, `nf4` and `int8` computing in bfloat16; adapters and moments are float32.",
    )
    compile: bool = Field(
        False, description="trl: fuses what lies between matmuls, with torch.compile; tunix always compiles."
    )
    compiler_options: dict[str, bool | int | float | str | None] = Field(
        {},
        description="tunix: XLA's flags by name, over those that Gemsmith sets (gemsmith.train.tunix.xla); null takes "
        "one of Gemsmith's away.",
    )
    tuned: AutoOrOff = Field(
        "auto",
        description="tunix: `off` trains without anything whose gain is modelled and not yet measured on a TPU: "
        "Gemsmith's XLA flags, the fused LoRA matmul, the kernel for heads, QK-norm and RoPE, layers chained and "
        "recomputed in turn, barriers around matmuls, the split vocabulary. The update is the same, but for rounding.",
    )
    checkpoint_every: Positive = Field(100, description="Steps.")
    keep_checkpoints: Positive = 3
    checkpoint_folder: str | None = Field(
        None, description="A folder or gs://bucket/folder for the checkpoints; null: in the run directory."
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="What a step does whose loss or gradient is NaN or infinite; skip: its update is left out."
    )
    spike_factor: Annotated[float, Field(gt=1)] = Field(
        3.0, description="A loss of more than this many times the median of the last 50 steps is a spike."
    )
    on_spike: Literal["report", "stop", "skip"] = Field("report", description="What a step does whose loss is a spike.")


class Export(Section):
    step: Positive | None = Field(None, description="The saved step to export; default: the last.")


class Serve(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(gt=0, lt=65_536)] | None = Field(None, description="Default: a free one.")
    max_model_len: Positive | None = Field(None, description="Tokens; default: what bench and eval need.")
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    python: str | None = Field(
        None, description="The Python of the environment that holds vLLM; default: .venv-serve beside Gemsmith's own."
    )
    start_timeout_s: Positive = 900
    arguments: tuple[str, ...] = Field((), description="Further arguments to vLLM's server.", strict=False)


class Bench(Section):
    input_tokens: tuple[Positive, ...] = Field((512, 4096), strict=False)
    output_tokens: Positive = 256
    request_rates: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (1.0, 4.0, 16.0), description="Requests a second.", strict=False
    )
    prompts: Positive = Field(128, description="Requests in a cell.")


class Eval(Section):
    scorer: ScorerName = Field("exact", description=f"What an answer is judged by: {describe_scorers()}.")
    max_tokens: Positive = 512
    limit: Positive | None = Field(None, description="Score only the first rows.")
    concurrency: Positive = 16


class Hardware(Section):
    machines: tuple[str, ...] = Field(
        ("v5p-8", "v6e-8", "2xh100"), description="Machines to plan for, of the catalogue.", strict=False
    )
    catalogue: str | None = Field(
        None, description="A YAML of chips and machines that replaces or adds to the shipped one."
    )


class Recipe(Section):
    """Everything a run needs to know."""

    model: str | None = Field(
        None, description="gemma4-e2b, -e4b, -12b, -26b-a4b, -31b, a tiny one; default: what the checkpoint is."
    )
    checkpoint: str = Field(description="A folder, a Hugging Face hub id, or gs://bucket/folder.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    data: Data
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    export: Export = Export()
    serve: Serve = Serve()
    bench: Bench = Bench()
    eval: Eval = Eval()
    hardware: Hardware = Hardware()


class Derived(NamedTuple):
    """A value that the user did not write, and why it is what it is."""

    key: str
    value: Any
    reason: str

    @property
    def plain_value(self) -> Any:
        """As JSON and YAML have it."""
        return list(self.value) if isinstance(self.value, tuple) else self.value


def check_recipe(recipe: Recipe) -> None:
    """Raises RecipeError where keys contradict each other, whatever the model's numbers and the machine."""
    _check_warmup(recipe.optimizer)
    _check_checkpoint_folder(recipe.train)
    _check_offload(recipe.train)
    _check_backend(recipe.train)
    if recipe.model not in (None, "custom"):
        find_variant(recipe.model)
        named = variant_of_hub_id(recipe.checkpoint)
        if named and named.name != recipe.model:
            raise RecipeError(
                f"model: {recipe.model} was given, but checkpoint {recipe.checkpoint} is {named.name}; set one of them"
            )
        lora_targets(find_variant(recipe.model), recipe.lora.targets)


def _check_warmup(optimizer: Optimizer) -> None:
    steps, ratio = optimizer.warmup_steps, optimizer.warmup_ratio
    if steps is not None and ratio is not None:
        raise RecipeError(
            f"optimizer.warmup_steps: {steps} was given, and optimizer.warmup_ratio {ratio:g}; set one of them, the "
            "other null"
        )


def _check_checkpoint_folder(train: Train) -> None:
    folder = train.checkpoint_folder or ""
    if "://" not in folder:
        return
    if not folder.startswith("gs://"):
        raise RecipeError(f"train.checkpoint_folder: {folder!r} was given; allowed: a folder, or gs://bucket/folder")
    if not BACKENDS[train.backend].buckets:
        raise RecipeError(
            f"train.checkpoint_folder: {folder} was given, but train.backend {train.backend} saves to folders only; "
            "give one that all processes see, or null"
        )


def _check_offload(train: Train) -> None:
    """What waits in the host's memory is not saved on the device, too."""
    if train.offload and train.remat == "none":
        raise RecipeError(
            "train.offload: train.remat is none, which saves all on the device; set it to auto, layer or names of what "
            "to save there"
        )
    saved = train.remat if isinstance(train.remat, tuple) else ()
    if both := [name for name in train.offload if name in saved]:
        raise RecipeError(
            f"train.offload: {', '.join(both)} is saved on the device by train.remat; name it in one of them"
        )


def _check_backend(train: Train) -> None:
    """What one of the backends has not, whatever the machine."""
    name, backend = train.backend, BACKENDS[train.backend]
    remat = NAMES if isinstance(train.remat, tuple) else train.remat
    for key, value, allowed in (
        ("attention", train.attention, ("auto", *backend.attentions)),
        ("remat", remat, ("auto", *backend.remats)),
        ("dtype", train.dtype, backend.dtypes),
    ):
        if value not in allowed:
            raise RecipeError(
                f"train.{key}: {value} was given, train.backend {name} has {', '.join(allowed)}; set one of them"
            )
    for key, reason in backend.lacks.items():
        if (value := getattr(train, key)) != Train.model_fields[key].default:
            others = " or ".join(other for other in BACKENDS if key not in BACKENDS[other].lacks)
            raise RecipeError(
                f"train.{key}: {_as_yaml(value)} was given, but train.backend {name} {reason}; leave it out, or set "
                f"train.backend to {others}"
            )


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values.

    >>> dict(flatten({"lora": {"rank": 8}, "seed": 0}))
    {'lora.rank': 8, 'seed': 0}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing_keys(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which two recipes differ, with both values."""
    left, right = (dict(flatten(recipe.model_dump(mode="json"))) for recipe in (one, other))
    return {
        key: (left.get(key), right.get(key))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    }


def with_values(recipe: Recipe, derived: Sequence[Derived]) -> Recipe:
    """The recipe with these values; what was set in it and what was left to its default can still be told apart."""
    for item in derived:
        recipe = _with_value(recipe, item.key.split("."), item.value)
    return recipe


def default_values() -> dict[str, Any]:
    """The value of every dotted key that a recipe need not give."""
    flat = flatten(Recipe(checkpoint="x", data=Data(train="x")).model_dump(mode="json"))
    return {key: value for key, value in flat if key not in ("checkpoint", "data.train")}


def later_defaults() -> dict[str, Any]:
    """Those of the keys in ADDED_LATER."""
    return {key: value for key, value in default_values().items() if key in ADDED_LATER}


def _with_value(section: Any, path: Sequence[str], value: Any) -> Any:
    key, *rest = path
    return section.model_copy(update={key: _with_value(getattr(section, key), rest, value) if rest else value})


def recipe_schema() -> dict[str, Any]:
    """The JSON schema that editors check a recipe with."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
