"""The page of a comparison, which needs nothing else, and the words for its differences and ratios in every form."""

import math
import re
from dataclasses import dataclass

from gemsmith.analysis.compare import NOT_RECORDED, Comparison, ConditionDifference, Pair
from gemsmith.analysis.confounders import KINDS
from gemsmith.analysis.published import TTFT_RATE, Reanalysis
from gemsmith.analysis.ratios import Ratio
from gemsmith.errors import some
from gemsmith.report.page import open_environment, render
from gemsmith.system.format import decimal, fraction, short_hash, span, usd

SWEPT_COLUMNS = ("tokens", "", f"ms TTFT at {TTFT_RATE:g} requests/s", "output tokens/s, the best of all rates")
"""Of a published comparison's sweeps: the two columns that the paper has."""


@dataclass(frozen=True, kw_only=True)
class RatioGroup:
    """Ratios of one kind that the same differences confound."""

    kind: str
    confounded_by: tuple[str, ...]
    ratios: tuple[Ratio, ...]

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(ratio.unit for ratio in self.ratios))

    @property
    def loads(self) -> list[tuple[str, list[Ratio | None]]]:
        """What was measured -> its ratio in each unit, None where there is none."""
        found = {(ratio.what, ratio.unit): ratio for ratio in self.ratios}
        names = dict.fromkeys(ratio.what for ratio in self.ratios)
        return [(name, [found.get((name, unit)) for unit in self.units]) for name in names]

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for ratio in self.ratios for note in ratio.notes))

    @property
    def intervals(self) -> list[str]:
        return list(dict.fromkeys(f"{ratio.unit}: {ratio.interval_of}" for ratio in self.ratios if ratio.interval))


def condition_value(value: str | None) -> str:
    """A condition's value, hashes cut short."""
    if value is None or value == "null":
        return NOT_RECORDED if value is None else "none"
    return short_hash(value) if re.fullmatch("[0-9a-f]{40,}", value) else value


def effect(difference: ConditionDifference) -> str:
    """What a difference does to the ratios, and why."""
    if difference.varying == difference.condition:
        return "what is compared"
    if difference.varying is not None:
        return f"follows from {difference.varying}"
    if not difference.confounds:
        return f"bears on nothing: {difference.why}"
    return f"{', '.join(difference.confounds)}: {difference.why}"


def title(comparison: Comparison) -> str:
    names = [side.name for side in comparison.sides]
    return f"{', '.join(names[1:])} against {names[0]}"


def summary_line(comparison: Comparison) -> str:
    bearing = sum(1 for each in comparison.differences if each.confounds)
    varying = f"What is compared is {' and '.join(comparison.varying)}. " if comparison.varying else ""
    if not bearing:
        nothing = "Nothing else" if varying else "Nothing"
        return f"{varying}{nothing} that bears on a ratio differs; {comparison.alike} conditions are alike."
    are = "conditions differ" if bearing > 1 else "condition differs"
    return (
        f"{varying}{bearing} {'other ' * bool(varying)}{are} or cannot be said to be alike, and bear"
        f"{'s' if bearing == 1 else ''} on a ratio; {comparison.alike} are alike. A ratio is a headline only where "
        "none bears on it."
    )


def groups(pair: Pair) -> list[RatioGroup]:
    """The ratios by kind, and within by what confounds them."""
    found: dict[tuple[str, tuple[str, ...]], list[Ratio]] = {}
    for ratio in sorted(pair.ratios, key=lambda ratio: KINDS.index(ratio.kind)):
        found.setdefault((ratio.kind, ratio.confounded_by), []).append(ratio)
    return [RatioGroup(kind=kind, confounded_by=by, ratios=tuple(ratios)) for (kind, by), ratios in found.items()]


def ratio_value(ratio: Ratio, which: float) -> str:
    """One of the two numbers of a ratio, with as many digits as its unit has."""
    if ratio.unit == "USD":
        return usd(which)
    return fraction(which) if ratio.kind == "quality" else decimal(which)


def ratio_words(ratio: Ratio) -> str:
    if ratio.value is None:
        return "–"
    return _points(ratio.value) if ratio.is_difference else f"{decimal(ratio.value)}\u00a0×"


def column(ratio: Ratio) -> str:
    return "difference" if ratio.is_difference else "ratio"


def interval_words(ratio: Ratio) -> str:
    """Its 95 % interval, or why there is none."""
    return ratio.interval_of if ratio.interval is None else f"{bounds(ratio)}, {ratio.interval_of}"


def bounds(ratio: Ratio) -> str:
    """The two ends of its interval, which it has."""
    assert ratio.interval is not None
    low, high = ratio.interval
    return f"{100 * low:+.1f} to {_points(high)}" if ratio.is_difference else span(decimal(low), decimal(high))


def extent(ratio: Ratio) -> tuple[float, float] | None:
    """How long its interval is, or the ratio by itself, and where that begins: shares of 1/16 to 16 on a log scale."""
    if not ratio.value or ratio.is_difference:
        return None
    ends = [min(max(0.5 + math.log2(max(end, 1e-9)) / 8, 0), 1) for end in ratio.interval or (ratio.value,) * 2]
    return ends[1] - ends[0], ends[0]


def why_no_headline(ratio: Ratio) -> str:
    """In a few words; empty for a headline."""
    if ratio.confounded_by:
        return f"no headline: confounded by {some(ratio.confounded_by, 3)}"
    return "; ".join(ratio.notes)


def _points(share: float) -> str:
    return f"{100 * share:+.1f}\u00a0points"


def render_comparison(comparison: Comparison, redrawn: Reanalysis | None = None) -> str:
    """The page; of a published comparison with what it says of itself. Raises MachineError as the report's page."""
    environment = open_environment()  # first, so that what is not installed is one line
    words = (condition_value, effect, ratio_value, ratio_words, column, interval_words, bounds, extent, why_no_headline)
    from gemsmith.report import bench_charts as charts

    names = [side.name for side in comparison.sides]
    bearing = [each for each in comparison.differences if each.confounds or each.varying]
    others = f", compared with {', '.join(names[2:])}" if names[2:] else ""
    at_catalog = redrawn.at_catalog if redrawn else ()
    pairs = []
    for pair in comparison.pairs:
        both, places = (pair.first, pair.other), (names.index(pair.first), names.index(pair.other))
        shown = {"pair": pair, "tiles": [ratio for ratio in pair.ratios if ratio.main], "groups": groups(pair)}
        shown["serving"] = charts.serving_charts(comparison, pair)
        shown["cost"] = [charts.cost_chart(curve, both, places=places) for curve in pair.curves]
        pairs.append(shown)
    return render(
        environment,
        "comparison.html",
        **{function.__name__: function for function in words},
        comparison=comparison,
        names=names,
        title=title(comparison) if redrawn is None else f"{redrawn.title}, drawn again{others}",
        summary_line=summary_line(comparison),
        redrawn=redrawn,
        swept_columns=SWEPT_COLUMNS,
        bearing=[each for each in bearing if each.varying or redrawn is None or None not in each.values],
        unsaid=[each for each in bearing if not each.varying and redrawn is not None and None in each.values],
        others=[each for each in comparison.differences if not each.confounds and not each.varying],
        pairs=pairs,
        loss=charts.loss_chart(comparison),
        at_catalog=[charts.cost_chart(curve, (names[0], names[1]), "at the catalog’s prices") for curve in at_catalog],
    )
