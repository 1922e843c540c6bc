"""One side of a comparison: what it was made under, and what came out.

A run's records make one, and so do published tables. A condition's name is a dotted key of the recipe, or a record and
what it says, such as `train:machine`.
"""

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import ConfigDict, Field

from gemsmith.bench_records import Requests
from gemsmith.records import Part

Way = Literal["on demand", "spot"]
WAYS: tuple[Way, ...] = ("on demand", "spot")
STALE = ":stale"
"""Ends the name of the condition that a stage's record was made from other settings or records than those there now."""


class Cell(Part):
    """One load of a server and what it did under it."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    input_tokens: int
    output_tokens: int
    request_rate: float | None = None
    """Requests a second; None: all at once, or as many as `max_concurrency` lets."""
    max_concurrency: int | None = None
    asked: str | None = None
    """Instead of the rate: what a source says of it that gives none."""
    real_input_tokens: float | None = None
    """The mean of what was sent, where that is recorded."""
    requests: int | None = None
    """How many the numbers are of; None: not said."""
    unanswered: int = 0
    """Requests that failed or were cut."""
    output_tokens_per_s: float | None = None
    """None, as below: not said of this load."""
    ttft_ms: float | None = None
    """The median for runs; of published numbers what they give."""
    tpot_ms: float | None = None
    each: Requests | None = Field(default=None, exclude=True)
    """The answered requests one by one; None: not recorded."""

    @property
    def load(self) -> str:
        """The load in words, the same for two cells that can be compared.

        >>> Cell(input_tokens=512, output_tokens=256, request_rate=4, output_tokens_per_s=1).load
        '512 in, 256 out, 4 requests/s'
        """
        if self.asked is not None:
            return f"{self.input_tokens:,} in, {self.output_tokens:,} out, {self.asked}"
        rate = None if self.request_rate is None else f"{self.request_rate:g} requests/s"
        at_once = None if self.max_concurrency is None else f"{self.max_concurrency:,} at once"
        asked = ", ".join(filter(None, (rate, at_once))) or "a burst"
        return f"{self.input_tokens:,} in, {self.output_tokens:,} out, {asked}"


class SideScore(Part):
    """One task's score, from 0 to 1."""

    task: str
    """With all that must be the same for two scores to be compared: questions, samples, sampling, k."""
    name: str
    value: float
    low: float | None = None
    """95 % interval; None: not said."""
    high: float | None = None
    questions: int
    samples: int | None = None
    """Answers to each question; None, as below: not said, or `by_question` says it."""
    all_right: int | None = None
    """Questions whose answers were all right."""
    none_right: int | None = None
    by_question: dict[str, float] = Field(default_factory=dict)
    """Question -> share of its answers that are right; empty where the record holds none."""


class Rate(Part):
    """The price of an hour of a machine."""

    machine: str
    usd_per_hour: float
    basis: str
    date: str


class Side(Part):
    """What is compared. None, or empty: not recorded."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    name: str
    source: str
    conditions: dict[str, str | None]
    unproven: tuple[str, ...] = ()
    """Keys of the recipe that are no conditions, since a record may have been made with other values of them."""
    missing: tuple[str, ...] = ()
    """What is not there or cannot be read, a line each."""
    real_tokens_per_s: float | None = None
    timed_steps: tuple[tuple[float, float], ...] = Field(default=(), exclude=True)
    """Real tokens and seconds of every step that the speed is of."""
    losses: tuple[tuple[int, float], ...] = Field(default=(), exclude=True)
    """Step and loss."""
    steps: int | None = None
    rows: int | None = None
    """Documents that were kept for training."""
    rows_per_step: int | None = None
    row_tokens: int | None = None
    """Positions of a row, padding counted."""
    tokens: float | None = None
    """Real tokens that were trained on; None: its speed and hours say."""
    train_hours: float | None = None
    usd: float | None = None
    """What the source itself says that training cost."""
    usd_per_million_tokens: float | None = None
    """The same of a million real tokens."""
    cells: tuple[Cell, ...] = ()
    served_on: str | None = None
    prompt_token_s: float | None = None
    """The least that a token of a prompt takes there, at the peak of its chips; None: not known, or a CPU."""
    scores: tuple[SideScore, ...] = ()
    train_rates: dict[Way, Rate] = Field(default_factory=dict)
    serve_rates: dict[Way, Rate] = Field(default_factory=dict)

    @property
    def trained_tokens(self) -> float | None:
        """Real tokens that were trained on."""
        if self.tokens is not None or self.real_tokens_per_s is None or self.train_hours is None:
            return self.tokens
        return self.real_tokens_per_s * self.train_hours * 3600

    def train_usd(self, way: Way) -> float | None:
        """What its hours of training cost; None where hours or price are not recorded."""
        rate = self.train_rates.get(way)
        return None if rate is None or self.train_hours is None else rate.usd_per_hour * self.train_hours

    def total_usd(self, way: Way, hours: float) -> float | None:
        """Training, and so many hours of serving."""
        trained, rate = self.train_usd(way), self.serve_rates.get(way)
        return None if trained is None or rate is None else trained + rate.usd_per_hour * hours

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
