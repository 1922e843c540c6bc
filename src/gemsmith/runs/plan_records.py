"""What the stage plan writes into the run directory; see gemsmith.runs.records."""

from typing import Any, ClassVar

from pydantic import Field

from gemsmith.runs.records import Part, Range, Record


class PlanFix(Part):
    """The smallest change of the recipe found that makes it fit, and the plan of the recipe with it."""

    changes: dict[str, Any]  # keys of the recipe -> their values
    mesh: dict[str, int]
    hbm_bytes_per_chip: int
    step_s: Range
    hours: Range
    usd: Range | None
    usd_per_million_tokens: Range | None


class CompiledStep(Part):
    """What XLA's compiler for TPUs says of the step, beside what the formula did; bytes are of one chip."""

    topology: str
    versions: dict[str, str]
    error: str | None = None  # why there is nothing below: XLA refused the step, or a limit was reached
    peak_bytes: int | None = None  # the most that XLA has in use at once
    argument_bytes: int | None = None
    remat: str | tuple[str, ...] | None = None  # what train.remat came to
    step_s: Range | None = None
    """Low: all collectives hidden. High: that of the program as scheduled times what the only published run took
    more, or with none hidden, whichever is longer."""
    program_s: dict[str, float] = Field(default_factory=dict)  # the program's own, by what is taken of its collectives
    unpriced: tuple[str, ...] = ()  # operations that no time is known of
    cpu_s: float = 0.0
    disk_bytes: int = 0  # by the compiler's process at most
    cached: bool = False  # whether it was compiled for an earlier plan
    formula_bytes: int = 0
    formula_step_s: Range = (0.0, 0.0)


class PlanPrice(Part):
    """What an hour of a machine was reckoned with."""

    usd_per_hour: float
    basis: str  # provider, region and source
    date: str  # when that was read


class MachinePlan(Part):
    name: str
    chips: int
    fits: bool
    hbm_bytes_per_chip: int  # estimated peak
    hbm_limit_bytes_per_chip: int
    parts: dict[str, int] = Field(default_factory=dict)
    """What is held at the peak -> its bytes a chip, and `runtime`, which is set aside beside the peak."""
    exceeded_by: str | None = None  # the part with which the chip's memory was no longer enough; None where it is
    step_s: Range  # estimated
    measured: str | None = None  # the trainings on this machine that `step_s` rests on; None: on none
    startup_s: dict[str, Range] = Field(default_factory=dict)
    """What comes before the first step -> its seconds; assumed."""
    evaluations_s: Range = (0, 0)  # of all evaluations of train.eval_steps, with answers
    hours: Range | None  # of the start, `priced_steps` and evaluations; None where the machine does not fit
    usd: Range | None  # of `hours`; None also where the catalog has no on-demand price
    price_doubts: tuple[str, ...] = ()  # of the on-demand price: that it is not checked, or old
    usd_spot: Range | None = None  # the same at the cheapest spot price; high: with preemptions as assumed
    usd_per_million_tokens: Range | None = None
    """On demand, of real tokens; None also where how many these are is not known."""
    mesh: dict[str, int]
    compiled: CompiledStep | None = None
    """Where --compile asked for it: then `hbm_bytes_per_chip`, `step_s` and what follows are the compiler's."""
    price: PlanPrice | None = None  # on demand; None, here and below, where the catalog has no such price
    price_spot: PlanPrice | None = None  # the cheapest, whichever region has it
    fix: PlanFix | None = None  # None where the machine fits, and where no change was found
    notes: tuple[str, ...] = ()


class ServingPlan(Part):
    """Serving on a machine, prompts and answers of such lengths; estimated. None where the model does not fit."""

    machine: str
    input_tokens: int  # soft tokens counted
    output_tokens: int
    images: int = 0  # in each prompt
    fits: bool
    why: str | None = None  # why it does not
    measured: str | None = None  # the load tests on this machine that its times rest on; None: on none
    warnings: tuple[str, ...] = ()  # what is known to go wrong there, each with a link
    weight_dtype: str | None = None
    tensor_parallel: int | None = None
    copies: int | None = None  # of the weights, each on `tensor_parallel` devices
    cold_start_s: dict[str, dict[str, Range]] = Field(default_factory=dict)
    """How the weights come -> what comes before the first answer -> its seconds."""
    weights_bytes_per_chip: int | None = None
    kv_room_bytes_per_chip: int | None = None  # what is left for keys and values
    kv_bytes_per_request: int | None = None  # on each chip that holds a part of it, at its full length
    requests: int | None = None  # at once, in all copies: as many as there is room for, and as vLLM takes into a batch
    prefill_s: Range | None = None  # of a prompt, alone
    decode_step_s: Range | None = None  # a token for each request
    output_tokens_per_s: Range | None = None  # with so many requests always under way
    usd_per_million_tokens: Range | None = None  # output tokens, on demand; None also without a price

    @property
    def load(self) -> str:
        """Its prompts and answers.

        >>> ServingPlan(machine="v6e-8", input_tokens=512, output_tokens=16, images=1, fits=True).load
        '512 tokens in, those of 1 image among them, 16 out'
        """
        seen = f", those of {self.images} image{'s' if self.images > 1 else ''} among them"
        return f"{self.input_tokens:,} tokens in{seen if self.images else ''}, {self.output_tokens:,} out"


class PlanRecord(Record):
    stage: ClassVar[str] = "plan"
    model: str
    parameters: int
    trained_parameters: int
    steps: int | None  # None where the number of rows is not known before the data stage
    priced_steps: int  # what `hours` and `usd` are for: `steps`, or 1,000 where that is None
    tokens_per_step: int  # padding counted
    real_tokens_per_step: float | None = None  # without padding; None where that is not known
    machines: tuple[MachinePlan, ...]
    serving: tuple[ServingPlan, ...] = ()
    """A row a machine and length of bench.input_tokens; none for several hosts, nor for CPUs without a load test."""
    assumptions: tuple[str, ...]

    @property
    def priced(self) -> str:
        """What `hours` and `usd` are for, in words: how many steps a run has that was not counted is not known."""
        return f"{'' if self.steps is not None else 'every '}{self.priced_steps:,} steps"

    @property
    def serving_warnings(self) -> tuple[str, ...]:
        """Those of `serving`, each once, with the machines that it is about."""
        every = dict.fromkeys(warning for row in self.serving for warning in row.warnings)
        about = {each: dict.fromkeys(row.machine for row in self.serving if each in row.warnings) for each in every}
        return tuple(f"{', '.join(machines)}: {warning}" for warning, machines in about.items())
