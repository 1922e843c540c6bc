"""Sides next to each other: every difference, every ratio, what confounds it, and what a side's numbers contradict."""

from collections.abc import Iterator, Sequence

from gemsmith.analysis.confounders import RULES, Kind, follows_from, rule_of
from gemsmith.analysis.cost import Curve, cost_curve
from gemsmith.analysis.ratios import Ratio, find_ratios, is_inside, own_interval, refused_scores
from gemsmith.analysis.sides import STALE, WAYS, LoadCell, Side
from gemsmith.bench.cell import count_requests
from gemsmith.errors import InputError, suggest
from gemsmith.recipe.serving import BURST, GRIDS, Load
from gemsmith.runs.records import Part

MOST_PADDING = 0.5
CLOSE = 0.02  # relative: how far rounded numbers may be from what the others make of them
HOURS = (1.0, 8.0, 24.0)
NOT_RECORDED = "not recorded"


def check_side(side: Side) -> Iterator[str]:
    """One line for each contradiction or doubt, of a run or of a published table, the training's first."""
    yield from _training_doubts(side)
    # What the source says of cost, against hours × price and dollars / tokens.
    usd, each = side.train_usd("on demand"), side.usd_per_million_tokens
    if side.usd is not None and usd is not None and abs(side.usd / usd - 1) > CLOSE:
        yield f"its cost of {side.usd:.2f} USD is not hours × price, {usd:.2f} USD."
    found = usd / (side.trained_tokens / 1e6) if usd and side.trained_tokens else None
    if each is not None and found is not None and abs(each / found - 1) > CLOSE:
        yield f"its {each:.2f} USD a million tokens is not cost / tokens, {found:.2f} USD."
    if few := [cell for cell in side.cells if cell.requests is not None and cell.requests < needed_requests(cell)]:
        fewest = min(few, key=lambda cell: (cell.requests or 0) / needed_requests(cell))
        yield (
            f"{len(few)} of its {len(side.cells)} loads have too few requests for a server's steady state and its "
            f"percentiles: {fewest.requests} with {fewest.load}, which takes {needed_requests(fewest)}."
        )
    yield from side.below_the_floor()
    for score in side.scores:
        most = 1 - (score.none_right or 0) / score.questions
        if score.value > most + CLOSE / 2:
            yield (
                f"its {score.name} of {score.value:.3f} is more than the {most:.3f} that {score.none_right} of "
                f"{score.questions} questions without a right answer leave."
            )
    if side.scores and not any("base" in score.name for score in side.scores):
        yield "it gives no score of the untuned model, so what training changed is not known."
    if bare := [score for score in side.scores if score.low is None]:
        low, high = own_interval(bare[0])
        yield (
            f"its scores have no interval; over {bare[0].questions} questions {bare[0].name} may lie anywhere in "
            f"{low:.3f} to {high:.3f}."
        )


def padding_share(side: Side) -> float | None:
    """The share of the positions that padding took, by tokens and steps; None where they are not all recorded."""
    positions = (side.global_batch_size or 0) * (side.row_tokens or 0) * (side.steps or 0)
    return None if not positions or side.trained_tokens is None else 1 - side.trained_tokens / positions


def _training_doubts(side: Side) -> Iterator[str]:
    if (share := padding_share(side)) is not None and share > MOST_PADDING:
        yield (
            f"padding took {share:.0%} of the positions of its rows of {side.row_tokens:,}, so its speed in real "
            "tokens says how it padded as much as how fast it was."
        )
    if side.conditions.get("data.packing") != "false" or not (side.steps and side.rows and side.global_batch_size):
        return
    # One epoch of rows that are not packed cannot have more steps than rows.
    epochs = int(side.conditions.get("train.epochs") or 1)
    if (read := side.steps * side.global_batch_size) > epochs * side.rows:
        yield (
            f"{side.steps:,} steps of {side.global_batch_size} rows are {read:,} rows in {epochs} epoch"
            f"{'s' if epochs > 1 else ''}, and {side.rows:,} were kept: it was trained on other rows than it says."
        )


def needed_requests(cell: LoadCell) -> int:
    """How many requests the grid `paper` measures such a load with; its fewest where the rate is not said."""
    if cell.asked is not None:
        return GRIDS["paper"].fewest
    load = Load(
        input_tokens=cell.input_tokens,
        output_tokens=cell.output_tokens,
        request_rate=BURST if cell.request_rate is None else cell.request_rate,
        max_concurrency=cell.max_concurrency,
    )
    return count_requests(load, GRIDS["paper"]).measured


class ConditionDifference(Part):
    """A condition in which not all sides are known to be alike."""

    condition: str
    values: tuple[str | None, ...]  # of each side; None: not recorded
    confounds: tuple[Kind, ...]  # empty: it bears on no ratio, or is what the comparison is about
    why: str
    varying: str | None = None
    """The condition that the comparison is about, and of which this one is a consequence, or itself that one."""


class Pair(Part):
    """The first side against another."""

    first: str
    other: str
    ratios: tuple[Ratio, ...]
    curves: tuple[Curve, ...]
    refused: tuple[str, ...]  # what is not compared or not shown, and why


class Comparison(Part):
    """All that may be said of the sides; also what `--json` prints."""

    sides: tuple[Side, ...]
    varying: tuple[str, ...]
    differences: tuple[ConditionDifference, ...]
    alike: int  # conditions that all sides say alike
    pairs: tuple[Pair, ...]
    warnings: tuple[str, ...]  # what is missing, and what a side's own numbers contradict


def compare_sides(
    sides: Sequence[Side], *, varying: Sequence[str] = (), hours: Sequence[float] = HOURS, against: int = 1
) -> Comparison:
    """The comparison; the first side, or each of the first `against`, is what all after it are held against.

    `varying`: conditions that are compared on purpose. Default: the one key of the recipe that differs, where only one
    does. Raises InputError for a name that no side has.
    """
    known = dict.fromkeys(name for side in sides for name in side.conditions)
    for name in varying:
        if name not in known:
            raise InputError(f"--varying {name}: no run says that{suggest(name, known)}; give a key of the recipe")
    asked = tuple(varying)
    if not asked:
        keys = [each.condition for each in find_differences(sides, ()) if each.confounds and ":" not in each.condition]
        asked = tuple(keys) if len(keys) == 1 else ()
    return Comparison(
        sides=tuple(sides),
        varying=asked,
        differences=tuple(find_differences(sides, asked)),
        alike=sum(len({side.conditions.get(name) for side in sides}) == 1 for name in known),
        pairs=tuple(
            _pair(first, other, asked, hours)
            for place, first in enumerate(sides[:against], 1)
            for other in sides[place:]
        ),
        warnings=tuple(f"{side.name}: {line}" for side in sides for line in (*side.missing, *check_side(side))),
    )


def find_differences(sides: Sequence[Side], varying: tuple[str, ...]) -> list[ConditionDifference]:
    """Conditions whose values are not all recorded and equal, in the order of the rules.

    What neither side records counts where a ratio needs it to be the same. That a stage is stale always counts, and
    stands for the keys that it may have had other values of.
    """
    names = dict.fromkeys(name for side in sides for name in side.conditions)
    for name in (rule.pattern for rule in RULES if rule.needed):  # where all sides have a number that it bears on
        stage = name.partition(":")[0]
        if all({"bench": side.cells, "eval": side.scores}.get(stage, side.real_tokens_per_s) for side in sides):
            names[name] = None
    found = []
    for name in names:
        stale = name.endswith(STALE)
        values = tuple(side.conditions.get(name, "no" if stale else None) for side in sides)
        if not (len(set(values)) > 1 or values[0] is None or stale) or any(name in side.unproven for side in sides):
            continue
        rule, cause = rule_of(name), follows_from(name, varying)
        settled = {side.conditions.get(rule.settled_by) for side in sides} if rule.settled_by else {None}
        alike = len(settled) == 1 and None not in settled
        difference = ConditionDifference(
            condition=name,
            values=values,
            confounds=() if cause or alike else rule.confounds,
            why=f"{rule.settled_by} is the same" if alike else rule.why,
            varying=cause,
        )
        found.append(difference)
    order = [rule.pattern for rule in RULES]
    found.sort(key=lambda each: order.index(rule_of(each.condition).pattern))
    return sorted(found, key=lambda each: not each.confounds and each.varying is None)


def _pair(first: Side, other: Side, varying: tuple[str, ...], hours: Sequence[float]) -> Pair:
    differences, ratios = find_differences((first, other), varying), find_ratios(first, other, hours=hours)
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


def _confounds(ratio: Ratio, differences: Sequence[ConditionDifference]) -> tuple[str, ...]:
    """The differences that bear on a ratio; of a cost those of what it pays for, and of the prices of its way."""
    way, pays_for = ratio.what.rpartition(", ")[2].replace(" ", "_"), ratio.pays_for

    def bears_on_cost(difference: ConditionDifference) -> bool:
        stage, _, of = difference.condition.partition(":")
        if stage == "price":
            return f"_{way}" in of and (pays_for == "both" or of.startswith(pays_for))
        serves = "serving speed" in difference.confounds
        if pays_for == "serving":
            return serves
        return pays_for == "both" or not serves or "training speed" in difference.confounds

    found = [each for each in differences if ratio.kind in each.confounds]
    return tuple(each.condition for each in found if ratio.kind != "cost" or bears_on_cost(each))
