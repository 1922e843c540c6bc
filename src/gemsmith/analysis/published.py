"""The tables of a published comparison as two sides, and what it says of them put to the same questions as a run."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import Field

from gemsmith.analysis.compare import CLOSE, HOURS, Comparison, compare_sides
from gemsmith.analysis.cost import Curve, cost_curve
from gemsmith.analysis.ratios import common_cells
from gemsmith.analysis.sides import WAYS, LoadCell, Rate, Side, Way
from gemsmith.arch import find_variant
from gemsmith.hardware import Catalog, Price, load_catalog
from gemsmith.hardware.model.serving import least_token_s
from gemsmith.runs.records import Part
from gemsmith.system.yaml import parse_yaml

MACHINES = ("train:machine", "bench:machine")
TTFT_RATE = 4.0  # requests a second of the paper's TTFTs
_BEST = "the best of"
PAPER = Path(__file__).with_name("arxiv-2605-25645.yaml")


class Claim(Part):
    """One thing that is said of the figures, and what is asked of them to see whether it holds."""

    of: str  # the version that says it; so below
    what: str
    unit: str | None = None  # with `what` it names a ratio of the comparison
    ratio: float | None = None  # how many times better the first side is
    values: tuple[float, float] | None = None  # of the two sides; beside `ratio`, what that is of
    hours: float | None = None  # of serving
    within: float | None = None  # how far apart two numbers are said to be at most, relative
    most_input: int | None = None  # tokens of the loads that this is said of
    called: str = ""
    chance: bool = False  # whether the difference is said to be within chance
    alike: tuple[str, ...] = ()  # patterns of conditions that are said to be the same
    side: str | None = None
    machine: str | None = None
    region: str | None = None


class ClaimVerdict(Part):
    of: str
    claim: str
    found: str
    holds: bool


class Published(Part):
    """The file: figures and facts alone."""

    title: str
    read: str
    model: str
    sides: tuple[Side, Side]
    figures: dict[str, tuple[str | None, str | None]] = Field(default_factory=dict)
    """What else is reported -> of each side; None: not of that."""
    claims: tuple[Claim, ...] = ()
    catalog: dict[str, dict[str, tuple[str, str]]] = Field(default_factory=dict)
    """Side -> `train` and `serve` -> machine and region of the hardware catalog."""


class SweptLength(Part):
    """A side's sweep of rates at one length, in the two columns of the paper."""

    side: str
    input_tokens: int
    output_tokens: int
    ttft_ms: float | None  # at TTFT_RATE; None, as below: not said
    output_tokens_per_s: float | None  # the best of all rates


class Reanalysis(Part):
    title: str
    read: str
    comparison: Comparison  # of its two sides, and of each of them with every run that was put beside them
    figures: dict[str, tuple[str | None, ...]]  # what else it reports -> of each side and of each run
    swept: tuple[SweptLength, ...]
    at_catalog: tuple[Curve, ...]  # its hours at the catalog's prices, on demand and spot
    verdicts: tuple[ClaimVerdict, ...]


def read_published() -> Published:
    return Published.model_validate(parse_yaml(PAPER.read_text(encoding="utf-8"), str(PAPER)))


def reanalyze(
    published: Published, own: Sequence[Side] = (), *, varying: Sequence[str] = (), hours: Sequence[float] = HOURS
) -> Reanalysis:
    """The comparison by the code that compares runs, and every claim with what the figures say.

    `own`: runs compared with both. `varying`: by default the machines. Raises InputError for a condition of no side.
    """
    catalog, variant = load_catalog(), find_variant(published.model)
    first, other = (
        side.model_copy(update={"prompt_token_s": least_token_s(variant, catalog.machines[side.served_on or ""])})
        for side in published.sides
    )
    judged = compare_sides((first, other), varying=MACHINES)
    theirs = [side.model_copy(update={"name": f"paper's {side.name}" if own else side.name}) for side in (first, other)]
    comparison = compare_sides((*theirs, *map(_with_best, own)), varying=varying or MACHINES, hours=hours, against=2)
    dear, dearer = (at_catalog(side, published.catalog, catalog) for side in (first, other))
    verdicts = [_judge(claim, published, judged, catalog) for claim in published.claims]
    return Reanalysis(
        title=published.title,
        read=published.read,
        comparison=comparison,
        figures={what: (*both, *(side.figures.get(what) for side in own)) for what, both in published.figures.items()},
        swept=tuple(_swept(comparison.sides)),
        at_catalog=tuple(curve for way in WAYS if (curve := cost_curve(dear, dearer, way))),
        verdicts=tuple(sorted(verdicts, key=lambda verdict: verdict.holds)),
    )


def _swept(sides: Sequence[Side]) -> Iterator[SweptLength]:
    """Each length that a side was swept at, the sides below each other."""
    lengths = {(cell.input_tokens, cell.output_tokens) for side in sides for cell in side.cells if _is_best(cell)}
    for length in sorted(lengths):
        for side in sides:
            cells = [cell for cell in side.cells if (cell.input_tokens, cell.output_tokens) == length]
            at_rate = [cell for cell in cells if (cell.request_rate, cell.max_concurrency) == (TTFT_RATE, None)]
            ttft_ms = next((cell.ttft_ms for cell in at_rate), None)
            best = next((cell.output_tokens_per_s for cell in cells if _is_best(cell)), None)
            if ttft_ms is not None or best is not None:
                yield SweptLength(
                    side=side.name,
                    input_tokens=length[0],
                    output_tokens=length[1],
                    ttft_ms=ttft_ms,
                    output_tokens_per_s=best,
                )


def _is_best(cell: LoadCell) -> bool:
    return cell.asked is not None and cell.asked.startswith(_BEST)


def _with_best(side: Side) -> Side:
    """The side with, for each length, the most tokens a second of all its rates as a load of its own."""
    swept: dict[tuple[int, int], dict[float, LoadCell]] = {}
    for cell in side.cells:
        if cell.request_rate is not None and cell.max_concurrency is None and cell.output_tokens_per_s is not None:
            swept.setdefault((cell.input_tokens, cell.output_tokens), {})[cell.request_rate] = cell
    best = [
        max(rates.values(), key=lambda cell: cell.output_tokens_per_s or 0.0).model_copy(
            update=dict.fromkeys(("request_rate", "ttft_ms", "tpot_ms", "each"))
            | {"asked": f"{_BEST} {min(rates):g} to {max(rates):g} requests/s"}
        )
        for rates in swept.values()
        if len(rates) > 1
    ]
    return side.model_copy(update={"cells": (*side.cells, *best)})


def at_catalog(side: Side, places: Mapping[str, Mapping[str, tuple[str, str]]], catalog: Catalog) -> Side:
    """The side with the catalog's prices in place of its own."""
    rates: dict[str, dict[Way, Rate]] = {}
    for stage, (machine, region) in places[side.name].items():
        price = _price(catalog, machine, region)
        basis = f"{price.provider} {price.region}, {price.source}"
        rates[f"{stage}_rates"] = {
            way: Rate(machine=machine, usd_per_hour=usd, basis=basis, date=price.date)
            for way, usd in zip(WAYS, (price.usd_per_hour, price.usd_per_hour_spot), strict=True)
            if usd is not None
        }
    return side.model_copy(update=rates)


def _price(catalog: Catalog, machine: str, region: str) -> Price:
    return next(price for price in catalog.machines[machine].prices if price.region == region)


def _judge(claim: Claim, published: Published, comparison: Comparison, catalog: Catalog) -> ClaimVerdict:
    first, other = comparison.sides
    if claim.alike:
        names = (each.condition for each in comparison.differences)
        unlike = [name for name in names if any(fnmatchcase(name, pattern) for pattern in claim.alike)]
        found = f"differ, or are not said of one: {', '.join(unlike)}" if unlike else "all that is said is alike"
        said, holds = f"the same {claim.what} on both", not unlike
    elif claim.machine is not None and claim.region is not None:
        price = _price(catalog, claim.machine, claim.region)
        side = next(side for side in published.sides if side.name == claim.side)
        stated, now = side.serve_rates["on demand"].usd_per_hour, price.usd_per_hour
        assert now is not None
        where = f"in {claim.region}, where it served ({price.source}, {price.date})"
        said, found = f"{claim.machine} for {stated:.2f} USD/h", f"{now:.2f} USD/h {where}"
        holds = _is_close(stated, now)
    elif claim.within is not None:
        said, found, holds = _judge_within(claim, first, other)
    elif claim.hours is not None:
        said, found, holds = _judge_total(claim, cost_curve(first, other, "on demand"))
    else:
        said, found, holds = _judge_ratio(claim, comparison)
    return ClaimVerdict(of=claim.of, claim=said, found=found, holds=holds)


def _judge_ratio(claim: Claim, comparison: Comparison) -> tuple[str, str, bool]:
    """What the figures make of two numbers, of how many times better the first is, or of that it is chance."""
    what = f"{claim.what}, {claim.unit}" if claim.unit else claim.what
    values, lower = claim.values, True
    if claim.unit is not None:
        ratios = comparison.pairs[0].ratios
        ratio = next(ratio for ratio in ratios if (ratio.what, ratio.unit) == (claim.what, claim.unit))
        if claim.chance and ratio.interval:
            low, high = ratio.interval
            words = f"the difference is {100 * low:+.1f} to {100 * high:+.1f} points"
            return f"{what}: apart by chance", words, low < 0 < high
        values, lower = (ratio.first, ratio.other), ratio.better == "lower"
    assert values is not None
    if claim.ratio is not None:
        found = values[1] / values[0] if lower else values[0] / values[1]
        return f"{what}: {claim.ratio:.4g} ×", f"{found:.4g} × by its tables", _is_close(claim.ratio, found)
    stated = claim.values or values
    said, computed = (" and ".join(f"{value:,.2f}" for value in pair) for pair in (stated, values))
    return f"{what}: {said}", f"{computed} by its tables", all(map(_is_close, stated, values))


def _judge_total(claim: Claim, curve: Curve | None) -> tuple[str, str, bool]:
    """Where the stated ratio r is not that of the stated hours: it is that of (t₂ - r t₁) / (r p₁ - p₂) hours."""
    assert claim.hours is not None and claim.ratio is not None and curve is not None
    first, other = curve.usd(claim.hours)
    found = other / first
    holds, elsewhere = _is_close(claim.ratio, found), ""
    (trained, trained_other), (rate, rate_other) = curve.trained_usd, curve.usd_per_hour
    below = claim.ratio * rate - rate_other
    hours = (trained_other - claim.ratio * trained) / below if below else -1.0
    if not holds and hours >= 0:
        elsewhere = f"; {claim.ratio:.4g} × is that of {hours:.1f} h"
    said = f"training and {claim.hours:g} h of serving, {claim.called}: {claim.ratio:.4g} ×"
    return said, f"{found:.4g} × by its own prices{elsewhere}", holds


def _judge_within(claim: Claim, first: Side, other: Side) -> tuple[str, str, bool]:
    assert claim.within is not None
    pairs = {
        ours.load: theirs.output_tokens_per_s / ours.output_tokens_per_s
        for ours, theirs in common_cells(first, other)
        if ours.output_tokens_per_s and theirs.output_tokens_per_s
        if claim.most_input is None or ours.input_tokens <= claim.most_input
    }
    beyond = [load for load, ratio in pairs.items() if abs(ratio - 1) > claim.within + 0.005]
    widest = max(pairs, key=lambda load: abs(pairs[load] - 1))
    found = f"{len(beyond)} of {len(pairs)} loads are further apart, the widest {pairs[widest]:.3g} × ({widest})"
    return f"{claim.what} {claim.called} within {claim.within:.0%}", found, not beyond


def _is_close(said: float, found: float) -> bool:
    return abs(said / found - 1) <= CLOSE
