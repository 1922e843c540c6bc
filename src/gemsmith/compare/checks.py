"""What a side's own numbers contradict, or leave open: the same questions to a run and to a published table."""

from collections.abc import Iterator

from gemsmith.bench.steady import count_requests
from gemsmith.compare.ratios import own_interval
from gemsmith.compare.side import Cell, Side
from gemsmith.grids import BURST, GRIDS, Load

MOST_PADDING = 0.5
CLOSE = 0.02
"""Relative: how far rounded numbers may be from what the others make of them."""


def check_side(side: Side) -> Iterator[str]:
    """One line for each contradiction or doubt, the training's first."""
    yield from _padding(side)
    yield from _rows(side)
    yield from _dollars(side)
    yield from _requests(side)
    yield from side.below_the_floor()
    yield from _scores(side)


def padding_share(side: Side) -> float | None:
    """The share of the positions that padding took, by tokens and steps; None where they are not all recorded."""
    positions = (side.rows_per_step or 0) * (side.row_tokens or 0) * (side.steps or 0)
    return None if not positions or side.trained_tokens is None else 1 - side.trained_tokens / positions


def _padding(side: Side) -> Iterator[str]:
    share = padding_share(side)
    if share is not None and share > MOST_PADDING:
        yield (
            f"padding took {share:.0%} of the positions of its rows of {side.row_tokens:,}, so its speed in real "
            "tokens says how it padded as much as how fast it was."
        )


def _rows(side: Side) -> Iterator[str]:
    """One epoch of rows that are not packed cannot have more steps than rows."""
    if side.conditions.get("data.packing") != "false" or not (side.steps and side.rows and side.rows_per_step):
        return
    epochs = int(side.conditions.get("train.epochs") or 1)
    read = side.steps * side.rows_per_step
    if read > epochs * side.rows:
        yield (
            f"{side.steps:,} steps of {side.rows_per_step} rows are {read:,} rows in {epochs} epoch"
            f"{'s' if epochs > 1 else ''}, and {side.rows:,} were kept: it was trained on other rows than it says."
        )


def _dollars(side: Side) -> Iterator[str]:
    """What the source says of cost, against hours × price and dollars / tokens."""
    usd = side.train_usd("on demand")
    if side.usd is not None and usd is not None and abs(side.usd / usd - 1) > CLOSE:
        yield f"its cost of {side.usd:.2f} USD is not hours × price, {usd:.2f} USD."
    if side.usd_per_million_tokens is None or not usd or not side.trained_tokens:
        return
    each = usd / (side.trained_tokens / 1e6)
    if abs(side.usd_per_million_tokens / each - 1) > CLOSE:
        yield f"its {side.usd_per_million_tokens:.2f} USD a million tokens is not cost / tokens, {each:.2f} USD."


def _requests(side: Side) -> Iterator[str]:
    few = [cell for cell in side.cells if cell.requests is not None and cell.requests < needed_requests(cell)]
    if few:
        fewest = min(few, key=lambda cell: (cell.requests or 0) / needed_requests(cell))
        yield (
            f"{len(few)} of its {len(side.cells)} loads have too few requests for a server's steady state and its "
            f"percentiles: {fewest.requests} with {fewest.load}, which takes {needed_requests(fewest)}."
        )


def needed_requests(cell: Cell) -> int:
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


def _scores(side: Side) -> Iterator[str]:
    for score in side.scores:
        most = 1 - (score.none_right or 0) / score.questions
        if score.value > most + CLOSE / 2:
            yield (
                f"its {score.name} of {score.value:.3f} is more than the {most:.3f} that {score.none_right} of "
                f"{score.questions} questions without a right answer leave."
            )
    if side.scores and not any("base" in score.name for score in side.scores):
        yield "it gives no score of the untuned model, so what training changed is not known."
    bare = [score for score in side.scores if score.low is None]
    if bare:
        low, high = own_interval(bare[0])
        yield (
            f"its scores have no interval; over {bare[0].questions} questions {bare[0].name} may lie anywhere in "
            f"{low:.3f} to {high:.3f}."
        )
