"""The stages, in order: what each writes, which records it reads, and where it is; which keys, the schema says."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

from gemsmith.errors import InputError, suggest
from gemsmith.recipe.keys import KEYS
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.plan_records import PlanRecord
from gemsmith.runs.records import DataRecord, ExportRecord, Record, ServeRecord, TrainRecord, VerifyRecord


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One row of the table."""

    record: type[Record]
    upstream: tuple[str, ...] = ()  # the earlier stages whose records it reads
    function: str  # MODULE:NAME. Imported one at a time: jax, torch and matplotlib are there only while they are needed
    needs_server: bool = False


STAGES: dict[str, Stage] = {
    "plan": Stage(record=PlanRecord, function="gemsmith.plan.stage:plan"),
    "data": Stage(record=DataRecord, function="gemsmith.data.stage:prepare_data"),
    "train": Stage(record=TrainRecord, upstream=("data",), function="gemsmith.train.stage:train"),
    "export": Stage(record=ExportRecord, upstream=("train",), function="gemsmith.export.stage:export"),
    "verify": Stage(record=VerifyRecord, upstream=("export",), function="gemsmith.verify.stage:verify"),
    "serve": Stage(record=ServeRecord, upstream=("export",), function="gemsmith.serve.stage:serve", needs_server=True),
    "bench": Stage(record=BenchRecord, upstream=("export",), function="gemsmith.bench.stage:bench", needs_server=True),
    "eval": Stage(record=EvalRecord, upstream=("export",), function="gemsmith.evals.stage:evaluate", needs_server=True),
}
SERVED = tuple(name for name, stage in STAGES.items() if stage.needs_server)


def check_stage_names(names: Iterable[str], option: str, known: Collection[str] = STAGES.keys()) -> None:
    """Raises InputError for a name that is no stage's; `option` is what takes the names."""
    for name in names:
        if name not in known:
            raise InputError(f"{option} {name}: is no stage{suggest(name, known)}; allowed: {', '.join(known)}")


def depends_on(stage: str, other: str) -> bool:
    """Whether a stage is the other, or reads a record that depends on it.

    >>> depends_on("verify", "data"), depends_on("verify", "plan")
    (True, False)
    """
    return stage == other or any(depends_on(upstream, other) for upstream in STAGES[stage].upstream)


@cache
def reads(stage: str, key: str, *, image_requests: bool = False, held_out: bool = False) -> bool:
    """Whether a stage reads a dotted key of the recipe, or one below it.

    `image_requests`: bench.images. `held_out`: whether train.eval_steps is set.

    >>> reads("train", "lora.rank"), reads("train", "train.mesh.fsdp"), reads("export", "lora.rank")
    (True, True, False)
    """
    names = {stage, *(["questions"] if stage == "eval" or (stage == "bench" and image_requests) else [])}
    names |= {"held_out"} if stage == "data" and held_out else set()
    return any(
        (key == name or key.startswith(f"{name}.")) and not names.isdisjoint(said.stages.split())
        for name, said in KEYS.items()
    )
