"""The stages, in order: what each reads, what it writes, and where it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.plan_records import PlanRecord
from gemsmith.runs.records import DataRecord, ExportRecord, Record, ServeRecord, TrainRecord, VerifyRecord

_TRAINED_DATA = (
    *("data.train", "data.format", "data.template", "data.max_length", "data.packing", "data.on_too_long"),
    *("data.labels", "data.prompt", "data.held_out", "data.image_tokens", "data.max_patches", "data.on_bad_image"),
)
_SERVED_AS = (
    "seed",
    "serve.dtype",
    "serve.max_model_len",
    "serve.weights",
    "serve.images",
    "serve.kv_cache_dtype",
    "serve.arguments",
)


_ASKED = ("data.format", "data.labels", "data.prompt", "data.held_out", "data.image_tokens")
"""What makes the questions of held-out rows, beside these themselves."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One row of the table."""

    record: type[Record]
    keys: tuple[str, ...]
    """Keys of the recipe, or whole sections of it, that the stage reads."""
    since: tuple[str, ...] = ()
    """Keys that it reads as well, which it did not in earlier versions: at their defaults these are left out."""
    where_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys that it reads as well where a switch of the recipe is on: switch -> keys."""
    upstream: tuple[str, ...] = ()
    """The earlier stages whose records it reads."""
    function: tuple[str, str]
    """Module and name. Imported one at a time, so that jax, torch and matplotlib are there only while they are
    needed."""
    needs_server: bool = False


STAGES: dict[str, Stage] = {
    "plan": Stage(
        record=PlanRecord,
        keys=(
            *("model", "checkpoint", "data", "lora", "train", "hardware"),
            *("bench.grid", "bench.input_tokens", "bench.output_tokens", "bench.max_concurrency", "bench.images"),
            *("serve.dtype", "serve.kv_cache_dtype", "serve.max_model_len", "serve.images", "serve.container_image"),
        ),
        since=("serve.arguments",),
        function=("gemsmith.plan.stage", "plan"),
    ),
    "data": Stage(
        record=DataRecord,
        keys=("checkpoint", "seed", *_TRAINED_DATA, "train.epochs", "train.max_steps", "train.global_batch_size"),
        function=("gemsmith.data.stage", "prepare_data"),
    ),
    "train": Stage(
        record=TrainRecord,
        keys=("model", "checkpoint", "seed", *_TRAINED_DATA, "lora", "optimizer", "train"),
        upstream=("data",),
        function=("gemsmith.train.stage", "train"),
    ),
    "export": Stage(
        record=ExportRecord, keys=("export",), upstream=("train",), function=("gemsmith.export.stage", "export")
    ),
    "verify": Stage(record=VerifyRecord, keys=(), upstream=("export",), function=("gemsmith.verify.stage", "verify")),
    "serve": Stage(
        record=ServeRecord,
        keys=("serve",),
        upstream=("export",),
        function=("gemsmith.serve.stage", "serve"),
        needs_server=True,
    ),
    "bench": Stage(
        record=BenchRecord,
        keys=(*_SERVED_AS, "bench"),
        where_on={"bench.images": ("data.eval", *_ASKED)},
        upstream=("export",),
        function=("gemsmith.bench.stage", "bench"),
        needs_server=True,
    ),
    "eval": Stage(
        record=EvalRecord,
        keys=(*_SERVED_AS, "data.eval", "eval"),
        since=_ASKED,
        upstream=("export",),
        function=("gemsmith.evals.stage", "evaluate"),
        needs_server=True,
    ),
}
SERVED = tuple(name for name, stage in STAGES.items() if stage.needs_server)
