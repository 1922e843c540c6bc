"""Sides put next to each other: every difference, every ratio, and the differences that confound each."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from gemsmith.compare.checks import check_side
from gemsmith.compare.curve import Curve, cost_curve
from gemsmith.compare.ratios import Ratio, find_ratios, is_inside, refused_scores
from gemsmith.compare.rules import RULES, Kind, follows_from, needed_conditions, rule_of
from gemsmith.compare.side import STALE, WAYS, Side
from gemsmith.errors import InputError, nearest
from gemsmith.records import Part

HOURS = (1.0, 8.0, 24.0)
NOT_RECORDED = "not recorded"


class Difference(Part):
    """A condition in which not all sides are known to be alike."""

    condition: str
    values: tuple[str | None, ...]
    """Of each side; None: not recorded."""
    confounds: tuple[Kind, ...]
    """Empty: it bears on no ratio, or is what the comparison is about."""
    why: str
    about: str | None = None
    """The condition that the comparison is about, and of which this one is a consequence, or itself that one."""


class Pair(Part):
    """The first side against another."""

    first: str
    other: str
    ratios: tuple[Ratio, ...]
    curves: tuple[Curve, ...]
    refused: tuple[str, ...]
    """What is not compared or not shown, and why."""

    def headlines(self) -> list[Ratio]:
        """The ratios that nothing confounds."""
        return [ratio for ratio in self.ratios if ratio.is_headline]


class Comparison(Part):
    """All that may be said of the sides; also what `--json` prints."""

    sides: tuple[Side, ...]
    about: tuple[str, ...]
    differences: tuple[Difference, ...]
    alike: int
    """Conditions that all sides say alike."""
    pairs: tuple[Pair, ...]
    notices: tuple[str, ...]
    """What is missing, and what a side's own numbers contradict."""


def compare_sides(
    sides: Sequence[Side], *, about: Sequence[str] = (), hours: Sequence[float] = HOURS, against: int = 1
) -> Comparison:
    """The comparison; the first side, or each of the first `against`, is what all after it are held against.

    `about`: conditions that are compared on purpose. Default: the one key of the recipe that differs, where only one
    does. Raises InputError for a name that no side has.
    """
    known = dict.fromkeys(name for side in sides for name in side.conditions)
    for name in about:
        if name not in known:
            raise InputError(f"--about {name}: no run says that{nearest(name, known)}; give a key of the recipe")
    asked = tuple(about) or _only_key(find_differences(sides, ()))
    differences = find_differences(sides, asked)
    return Comparison(
        sides=tuple(sides),
        about=asked,
        differences=tuple(differences),
        alike=sum(len({side.conditions.get(name) for side in sides}) == 1 for name in known) if sides[1:] else 0,
        pairs=tuple(
            _pair(first, other, asked, hours)
            for place, first in enumerate(sides[:against], 1)
            for other in sides[place:]
        ),
        notices=tuple(line for side in sides for line in (*side.missing, *check_side(side)))
        if not sides[1:]
        else tuple(f"{side.name}: {line}" for side in sides for line in (*side.missing, *check_side(side))),
    )


def find_differences(sides: Sequence[Side], about: tuple[str, ...]) -> list[Difference]:
    """Conditions whose values are not all recorded and equal, in the order of the rules.

    What neither side records counts where a ratio needs it to be the same. That a stage is stale always counts, and
    stands for the keys that it may have had other values of.
    """
    names = dict.fromkeys(name for side in sides for name in side.conditions)
    names |= dict.fromkeys(name for name in needed_conditions() if _concerns(name, sides))
    found = [
        _difference(name, values, sides, about)
        for name in names
        if len(set(values := tuple(_value(side, name) for side in sides))) > 1
        or values[0] is None
        or name.endswith(STALE)
        if not any(name in side.unproven for side in sides)
    ]
    order = [rule.pattern for rule in RULES]

    def place(difference: Difference) -> tuple[bool, int]:
        name = difference.condition
        return not difference.confounds and difference.about is None, next(
            (number for number, pattern in enumerate(order) if fnmatchcase(name, pattern)), len(order)
        )

    return sorted(found, key=place) if sides[1:] else []


def _value(side: Side, name: str) -> str | None:
    return side.conditions.get(name, "no" if name.endswith(STALE) else None)


def _difference(name: str, values: tuple[str | None, ...], sides: Sequence[Side], about: tuple[str, ...]) -> Difference:
    rule, cause = rule_of(name), follows_from(name, about)
    settled = {side.conditions.get(rule.settled_by) for side in sides} if rule.settled_by else {None}
    alike = len(settled) == 1 and None not in settled
    return Difference(
        condition=name,
        values=values,
        confounds=() if cause or alike else rule.confounds,
        why=f"{rule.settled_by} is the same" if alike else rule.why,
        about=cause,
    )


def _concerns(name: str, sides: Sequence[Side]) -> bool:
    """Whether all sides have a number that the condition bears on."""
    stage = name.partition(":")[0]
    if stage == "bench":
        return all(side.cells for side in sides)
    if stage == "eval":
        return all(side.scores for side in sides)
    return all(side.real_tokens_per_s for side in sides)


def _only_key(differences: Sequence[Difference]) -> tuple[str, ...]:
    """The key of the recipe that differs, where only one that bears on a ratio does."""
    keys = [each.condition for each in differences if ":" not in each.condition and each.confounds]
    return tuple(keys) if len(keys) == 1 else ()


def _pair(first: Side, other: Side, about: tuple[str, ...], hours: Sequence[float]) -> Pair:
    differences, ratios = find_differences((first, other), about), find_ratios(first, other, hours=hours)
    outside = [ratio for ratio in ratios if not is_inside(ratio.value, ratio.interval)]
    return Pair(
        first=first.name,
        other=other.name,
        ratios=tuple(
            ratio.model_copy(update={"confounded_by": _confounds(ratio, differences)})
            for ratio in ratios
            if ratio not in outside
        ),
        curves=tuple(curve for way in WAYS if (curve := cost_curve(first, other, way)) is not None),
        refused=(
            *refused_scores(first, other),
            *(f"Not shown, since it lies outside its own interval: {ratio.what}, {ratio.unit}." for ratio in outside),
        ),
    )


def _confounds(ratio: Ratio, differences: Sequence[Difference]) -> tuple[str, ...]:
    """The differences that bear on a ratio; of a cost those of what it pays for, and of the prices of its way."""
    found = [each for each in differences if ratio.kind in each.confounds]
    if ratio.kind == "cost":
        way = ratio.what.rpartition(", ")[2].replace(" ", "_")
        found = [each for each in found if _bears_on_cost(each, ratio.pays_for, way)]
    return tuple(each.condition for each in found)


def _bears_on_cost(difference: Difference, pays_for: str, way: str) -> bool:
    stage, _, of = difference.condition.partition(":")
    if stage == "price":
        return f"_{way}" in of and (pays_for == "both" or of.startswith(pays_for))
    serves = "serving speed" in difference.confounds
    return (
        serves
        if pays_for == "serving"
        else pays_for == "both" or not serves or "training speed" in difference.confounds
    )
