"""The tables of a published comparison as two sides, and what it says of them put to the same questions as a run."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import Field

from gemsmith.compare.checks import CLOSE
from gemsmith.compare.comparison import Comparison, compare_sides
from gemsmith.compare.curve import Curve, cost_curve
from gemsmith.compare.ratios import common_cells
from gemsmith.compare.side import WAYS, Rate, Side, Way
from gemsmith.hardware import Catalogue, Price, load_catalogue
from gemsmith.plain_yaml import parse_yaml
from gemsmith.records import Part

PAPER = Path(__file__).with_name("arxiv-2605-25645.yaml")


class Claim(Part):
    """One thing that is said of the figures, and what is asked of them to see whether it holds."""

    what: str
    ratio: float | None = None
    """Of the other side to the first."""
    hours: float | None = None
    """Of serving."""
    within: float | None = None
    """How far apart two numbers are said to be at most, relative."""
    called: str = ""
    load: str | None = None
    alike: tuple[str, ...] = ()
    """Patterns of conditions that are said to be the same."""
    side: str | None = None
    machine: str | None = None
    region: str | None = None


class Verdict(Part):
    """A claim and what its own figures, by the same code as a run's, say."""

    claim: str
    found: str
    holds: bool


class Published(Part):
    """The file: figures and facts alone."""

    title: str
    read: str
    sides: tuple[Side, Side]
    claims: tuple[Claim, ...] = ()
    catalogue: dict[str, dict[str, tuple[str, str]]] = Field(default_factory=dict)
    """Side -> `train` and `serve` -> machine and region of the hardware catalogue."""


class Redrawn(Part):
    """A published comparison, drawn again."""

    title: str
    read: str
    comparison: Comparison
    at_catalogue: tuple[Curve, ...]
    """Its hours at the catalogue's prices, on demand and spot."""
    verdicts: tuple[Verdict, ...]


def read_published(file: Path = PAPER) -> Published:
    """The shipped record of a published comparison."""
    return Published.model_validate(parse_yaml(file.read_text(encoding="utf-8"), str(file)))


def redraw(published: Published) -> Redrawn:
    """The comparison by the code that compares runs, and every claim with what the figures say."""
    comparison = compare_sides(published.sides, about=("train:machine", "bench:machine"))
    catalogue = load_catalogue()
    first, other = (at_catalogue(side, published.catalogue, catalogue) for side in published.sides)
    curves = tuple(curve for way in WAYS if (curve := cost_curve(first, other, way)) is not None)
    verdicts = [verdict for claim in published.claims for verdict in _judge(claim, published, comparison, catalogue)]
    return Redrawn(
        title=published.title,
        read=published.read,
        comparison=comparison,
        at_catalogue=curves,
        verdicts=tuple(sorted(verdicts, key=lambda verdict: verdict.holds)),
    )


def at_catalogue(side: Side, places: Mapping[str, Mapping[str, tuple[str, str]]], catalogue: Catalogue) -> Side:
    """The side with the catalogue's prices in place of its own."""
    rates = {stage: dict(_rates(catalogue, *place)) for stage, place in places[side.name].items()}
    return side.model_copy(update={"train_rates": rates["train"], "serve_rates": rates["serve"]})


def _rates(catalogue: Catalogue, machine: str, region: str) -> Iterator[tuple[Way, Rate]]:
    price = _price(catalogue, machine, region)
    prices: tuple[tuple[Way, float | None], ...] = (
        ("on demand", price.usd_per_hour),
        ("spot", price.usd_per_hour_spot),
    )
    for way, usd in prices:
        if usd is not None:
            basis = f"{price.provider} {price.region}, {price.source}"
            yield way, Rate(machine=machine, usd_per_hour=usd, basis=basis, date=price.date)


def _price(catalogue: Catalogue, machine: str, region: str) -> Price:
    return next(price for price in catalogue.machines[machine].prices if price.region == region)


def _judge(claim: Claim, published: Published, comparison: Comparison, catalogue: Catalogue) -> Iterator[Verdict]:
    first, other = published.sides
    if claim.alike:
        yield _judge_alike(claim, comparison)
    elif claim.machine is not None and claim.region is not None:
        yield _judge_price(claim, published, _price(catalogue, claim.machine, claim.region))
    elif claim.within is not None:
        yield _judge_within(claim, first, other)
    elif claim.what == "total cost":
        curve = cost_curve(first, other, "on demand")
        assert curve is not None
        yield _judge_total(claim, curve)
    else:
        yield _judge_ratio(claim, _ratio(claim, first, other))


def _ratio(claim: Claim, first: Side, other: Side) -> float:
    """What the figures make of a claimed ratio."""
    if claim.load is not None:
        ours, theirs = next(pair for pair in common_cells(first, other) if pair[0].load == claim.load)
        assert ours.ttft_ms and theirs.ttft_ms
        return theirs.ttft_ms / ours.ttft_ms
    values = [side.train_hours if claim.what == "training time" else side.usd for side in (first, other)]
    assert values[0] and values[1]
    return values[1] / values[0]


def _judge_ratio(claim: Claim, found: float) -> Verdict:
    where = f" ({claim.load})" if claim.load else ""
    return Verdict(
        claim=f"{claim.what}{where}: {claim.ratio:.4g} ×",
        found=f"{found:.4g} × by its tables",
        holds=claim.ratio is not None and _is_close(claim.ratio, found),
    )


def _judge_total(claim: Claim, curve: Curve) -> Verdict:
    assert claim.hours is not None and claim.ratio is not None
    found = curve.ratio(claim.hours)
    assert found is not None
    holds = _is_close(claim.ratio, found)
    reached = _hours_at(claim.ratio, curve)
    elsewhere = f"; {claim.ratio:.4g} × is that of {reached:.1f} h" if not holds and reached is not None else ""
    called = f", {claim.called}" if claim.called else ""
    return Verdict(
        claim=f"training and {claim.hours:g} h of serving{called}: {claim.ratio:.4g} ×",
        found=f"{found:.4g} × by its own prices{elsewhere}",
        holds=holds,
    )


def _hours_at(ratio: float, curve: Curve) -> float | None:
    """The hours of serving at which the two cost so many times each other: (t₂ - r t₁) / (r p₁ - p₂)."""
    (first, other), (rate, rate_other) = curve.trained_usd, curve.usd_per_hour
    below = ratio * rate - rate_other
    hours = (other - ratio * first) / below if below else -1.0
    return hours if hours >= 0 else None


def _judge_within(claim: Claim, first: Side, other: Side) -> Verdict:
    assert claim.within is not None
    pairs = {
        ours.load: theirs.output_tokens_per_s / ours.output_tokens_per_s for ours, theirs in common_cells(first, other)
    }
    apart = {load: abs(ratio - 1) for load, ratio in pairs.items()}
    beyond = [load for load, gap in apart.items() if gap > claim.within + 0.005]
    widest = max(apart, key=lambda load: apart[load])
    return Verdict(
        claim=f"{claim.what} {claim.called} within {claim.within:.0%}",
        found=f"{len(beyond)} of {len(pairs)} loads are further apart, the widest {pairs[widest]:.3g} × ({widest})",
        holds=not beyond,
    )


def _judge_alike(claim: Claim, comparison: Comparison) -> Verdict:
    unlike = [
        each.condition
        for each in comparison.differences
        if any(fnmatchcase(each.condition, pattern) for pattern in claim.alike)
    ]
    return Verdict(
        claim=f"the same {claim.what} on both",
        found=f"differ, or are not said of one: {', '.join(unlike)}" if unlike else "all that is said is alike",
        holds=not unlike,
    )


def _judge_price(claim: Claim, published: Published, price: Price) -> Verdict:
    side = next(side for side in published.sides if side.name == claim.side)
    stated = side.serve_rates["on demand"].usd_per_hour
    assert price.usd_per_hour is not None
    return Verdict(
        claim=f"{claim.machine} for {stated:.2f} USD/h",
        found=f"{price.usd_per_hour:.2f} USD/h in {claim.region}, where it served ({price.source}, {price.date})",
        holds=_is_close(stated, price.usd_per_hour),
    )


def _is_close(said: float, found: float) -> bool:
    return abs(said / found - 1) <= CLOSE
