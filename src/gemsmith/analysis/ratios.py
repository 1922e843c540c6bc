"""The ratios of two sides, each with its 95 % interval where what was recorded one by one gives one.

Steps, requests, and the tokens of requests are resampled. Neighbors are slow together, so circular blocks of n^⅓
neighbors are drawn (Politis and Romano 1992, in Exploring the Limits of Bootstrap). Every interval is seeded.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from gemsmith.analysis.confounders import Kind
from gemsmith.analysis.cost import cost_curve
from gemsmith.analysis.sides import WAYS, LoadCell, Side, SideScore
from gemsmith.evals.metrics import bootstrap_interval, wilson_interval
from gemsmith.runs.bench_records import Requests
from gemsmith.runs.records import Part, Range

RESAMPLES, SEED = 10_000, 0
MEDIAN_RESAMPLES = 2_000
"""Each takes the median of as many requests as there are; the ends of the interval move by less than 2 % of it."""
WINDOWS = 50
_CHUNK = 2_000_000
DRIFT = 0.25
"""Relative: halves of a training that differ by more say that something else took part, such as another load."""
_FEWEST_HALF = 5
_PROMPTS_APART = 0.02
_ROUNDED = 0.005
_WRITTEN_SHARE = 0.75
ASKED_SHARE = 0.9  # a server that gives this share of the tokens that its requests ask for is limited by them
PaysFor = Literal["training", "serving", "both"]


def bootstrap_ratio(first: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> Range:
    """The interval of (Σa/Σb of other) / (Σa/Σb of first) for pairs (a, b): 10,000 resamples of each.

    >>> bootstrap_ratio([(10, 1)] * 5, [(30, 2)] * 5)
    (1.5, 1.5)
    """
    generator, speeds = np.random.default_rng(SEED), []
    for pairs in (np.asarray(each, dtype=float) for each in (first, other)):
        block = _block(len(pairs))
        # Sums of the blocks from each place on: a draw is then of blocks alone.
        circle = np.concatenate((np.zeros((1, 2)), np.cumsum(np.concatenate((pairs, pairs[:block])), axis=0)))
        blocks = circle[block : block + len(pairs)] - circle[: len(pairs)]
        number = math.ceil(len(pairs) / block)
        rows = max(1, _CHUNK // number)
        totals = np.concatenate([
            blocks[generator.integers(len(blocks), size=(min(rows, RESAMPLES - start), number))].sum(axis=1)
            for start in range(0, RESAMPLES, rows)
        ])  # fmt: skip
        speeds.append(totals[:, 0] / totals[:, 1])
    return _middle(speeds[1] / speeds[0])


def bootstrap_medians(first: Sequence[float], other: Sequence[float], *, paired: bool) -> Range:
    """The interval of median(other) / median(first); `paired`: a place is the same in both, and is drawn in both.

    >>> bootstrap_medians([10, 20, 30], [20, 40, 60], paired=True)
    (2.0, 2.0)
    """
    generator = np.random.default_rng(SEED)
    values, others = np.asarray(first, dtype=float), np.asarray(other, dtype=float)
    rows = max(1, _CHUNK // max(len(values), len(others)))
    ratios = []
    for start in range(0, MEDIAN_RESAMPLES, rows):
        number = min(rows, MEDIAN_RESAMPLES - start)
        drawn = _drawn_places(len(values), number, generator)
        drawn_others = drawn if paired else _drawn_places(len(others), number, generator)
        ratios.append(np.median(others[drawn_others], axis=1) / np.median(values[drawn], axis=1))
    return _middle(np.concatenate(ratios))


def token_windows(requests: Requests, output_tokens: int) -> list[tuple[float, float]]:
    """Output tokens and seconds of WINDOWS equal parts of the time from the first token to the last.

    A request's first token comes at its TTFT, the others evenly until its end. The time before the first token is added
    to all parts alike, so that all tokens over all seconds is the recorded throughput.
    """
    starts, latencies = np.asarray(requests.start_ms), np.asarray(requests.latency_ms)
    begins, ends = starts + np.asarray(requests.ttft_ms), starts + latencies
    edges = np.linspace(begins.min(), ends.max(), WINDOWS + 1)
    since = edges[:, None] - begins
    shares = np.clip(since / np.maximum(ends - begins, 1e-9), 0.0, 1.0)
    written = np.where(since >= 0, 1 + (output_tokens - 1) * shares, 0.0).sum(axis=1)
    written[0], written[-1] = 0.0, output_tokens * len(starts)
    seconds = float(ends.max()) / 1000 / WINDOWS
    return [(float(tokens), seconds) for tokens in np.diff(written)]


def written_share(requests: Requests, windows: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the first start on in whose windows tokens came."""
    first = min(start + ttft for start, ttft in zip(requests.start_ms, requests.ttft_ms, strict=True))
    last = max(start + latency for start, latency in zip(requests.start_ms, requests.latency_ms, strict=True))
    return (1 - first / last) * sum(tokens > 0 for tokens, _ in windows) / len(windows) if last else 0.0


def _drawn_places(size: int, rows: int, generator: np.random.Generator) -> np.ndarray:
    """Places of `size` neighbors-in-blocks for each row, shape (rows, size)."""
    block = _block(size)
    starts = generator.integers(size, size=(rows, math.ceil(size / block)))
    return ((starts[:, :, None] + np.arange(block)) % size).reshape(rows, -1)[:, :size]


def _block(size: int) -> int:
    return max(1, round(size ** (1 / 3)))


def _middle(ratios: np.ndarray) -> Range:
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


class Ratio(Part):
    kind: Kind
    what: str
    unit: str = ""
    first: float
    other: float
    value: float | None
    """Other / first; of scores other - first; None where that cannot be formed, which `notes` says why."""
    is_difference: bool = False
    better: Literal["higher", "lower"]
    interval: Range | None = None
    interval_of: str  # what was resampled, or why there is no interval
    pays_for: PaysFor = "both"  # of a cost
    main: bool = False  # whether it stands for its kind
    notes: tuple[str, ...] = ()  # what bounds its meaning beside differences; with one it is no headline
    confounded_by: tuple[str, ...] = ()  # conditions that differ, or are not recorded, and bear on it

    @property
    def is_headline(self) -> bool:
        """Whether it may be quoted alone."""
        return self.main and self.value is not None and not self.confounded_by and not self.notes


def find_ratios(first: Side, other: Side, *, hours: Sequence[float]) -> list[Ratio]:
    return [*_training(first, other), *_serving(first, other), *_quality(first, other), *_cost(first, other, hours)]


def refused_scores(first: Side, other: Side) -> list[str]:
    """Why scores are not compared, a line each; empty where the two were scored alike or not at all."""
    wrong = [
        f"Not compared, since it lies outside its own interval: {side.name}: {score.name}."
        for side in (first, other)
        for score in side.scores
        if not is_inside(score.value, own_interval(score))
    ]
    ours, theirs = ({score.task: score.name for score in side.scores} for side in (first, other))
    if not ours or not theirs:
        return wrong
    alone = [f"{first.name}: {task}" for task in ours if task not in theirs]
    alone += [f"{other.name}: {task}" for task in theirs if task not in ours]
    return wrong + [f"Not compared, since the other was not scored on the same: {line}." for line in alone]


def is_inside(value: float | None, interval: Range | None) -> bool:
    """Whether a value lies in its interval; where either does not exist, it does. What is recorded is rounded."""
    if value is None or interval is None:
        return True
    slack = _ROUNDED * max(map(abs, interval))
    return interval[0] - slack <= value <= interval[1] + slack


def _training(first: Side, other: Side) -> Iterator[Ratio]:
    if not first.real_tokens_per_s or not other.real_tokens_per_s:
        return
    single = len(first.timed_steps) > 1 < len(other.timed_steps)
    interval = bootstrap_ratio(first.timed_steps, other.timed_steps) if single else None
    yield Ratio(
        kind="training speed",
        what="training",
        unit="real tokens/s",
        first=first.real_tokens_per_s,
        other=other.real_tokens_per_s,
        value=other.real_tokens_per_s / first.real_tokens_per_s,
        better="higher",
        interval=interval,
        interval_of="steps resampled, one run each" if interval else "no single steps recorded",
        main=True,
        notes=tuple(
            f"{side.name} was not steady: {drift[0]:,.0f} real tokens/s in its first half, "
            f"{drift[1]:,.0f} in its second"
            for side in (first, other)
            if (drift := speed_drift(side))
        ),
    )


def speed_drift(side: Side) -> tuple[float, float] | None:
    """Real tokens/s of the first and the second half of the steps, where they differ by more than DRIFT."""
    if (middle := len(side.timed_steps) // 2) < _FEWEST_HALF:
        return None
    halves = side.timed_steps[:middle], side.timed_steps[middle:]
    early, late = (sum(tokens for tokens, _ in half) / sum(seconds for _, seconds in half) for half in halves)
    return (early, late) if max(early, late) > (1 + DRIFT) * min(early, late) else None


def common_cells(first: Side, other: Side) -> list[tuple[LoadCell, LoadCell]]:
    """The loads that both sides were put under, the lightest first."""
    theirs = {cell.load: cell for cell in other.cells}
    pairs = [(cell, theirs[cell.load]) for cell in first.cells if cell.load in theirs]
    return sorted(pairs, key=lambda pair: (pair[0].input_tokens, pair[0].output_tokens, _heaviness(pair[0])))


def _heaviness(cell: LoadCell) -> tuple[float, float]:
    return cell.request_rate or math.inf, cell.max_concurrency or math.inf


def _serving(first: Side, other: Side) -> Iterator[Ratio]:
    pairs = common_cells(first, other)
    limited = {ours.load: asked_notes(ours, theirs) for ours, theirs in pairs}
    loaded = [ours for ours, _ in pairs if not limited[ours.load]] or [ours for ours, _ in pairs]
    heaviest = max(loaded, key=lambda cell: (*_heaviness(cell), cell.input_tokens), default=None)
    for ours, theirs in pairs:
        lost = _request_notes(first, ours, other, theirs)
        found: list[tuple[str, float, float, tuple[Range | None, str]]] = []
        if ours.output_tokens_per_s is not None and theirs.output_tokens_per_s is not None:
            speeds = ours.output_tokens_per_s, theirs.output_tokens_per_s
            found.append(("output tokens/s", *speeds, throughput_interval(ours, theirs)))
        for name in ("TTFT", "TPOT"):
            mine, yours = (getattr(cell, f"{name.lower()}_ms") for cell in (ours, theirs))
            if mine and yours:
                found.append((f"ms {name}", mine, yours, latency_interval(name, ours, theirs)))
        for unit, mine, yours, (interval, of) in found:
            is_latency = unit.startswith("ms ")
            yield Ratio(
                kind="serving speed",
                what=ours.load,
                unit=unit,
                first=mine,
                other=yours,
                value=yours / mine if mine else None,
                better="lower" if is_latency else "higher",
                interval=interval,
                interval_of=of,
                main=not is_latency and ours == heaviest,
                notes=lost if is_latency else (*limited[ours.load], *lost),
            )


def throughput_interval(ours: LoadCell, theirs: LoadCell) -> tuple[Range | None, str]:
    """The 95 % interval of tokens a second, by resampling how many came when; or why there is none."""
    if ours.each is None or theirs.each is None:
        return None, _requests_words(ours, theirs)
    each = [(cell.each, token_windows(cell.each, cell.output_tokens)) for cell in (ours, theirs) if cell.each]
    if min(written_share(*pair) for pair in each) < _WRITTEN_SHARE:
        return None, "its tokens came in too small a part of the time"
    return bootstrap_ratio(*(found for _, found in each)), f"{WINDOWS} parts of the time resampled, one run each"


def latency_interval(name: str, ours: LoadCell, theirs: LoadCell) -> tuple[Range | None, str]:
    """The 95 % interval of the medians' ratio, by resampling requests: in pairs where both had the same prompts."""
    if ours.each is None or theirs.each is None:
        return None, _requests_words(ours, theirs)
    values = [
        each.ttft_ms if name == "TTFT" else each.tpot_ms(cell.output_tokens)
        for cell, each in ((ours, ours.each), (theirs, theirs.each))
    ]
    if min(map(min, values)) <= 0:
        return None, "some of its times are zero"
    alike = ours.each.prompts_sha256 is not None and ours.each.prompts_sha256 == theirs.each.prompts_sha256
    paired = alike and not ours.unanswered and not theirs.unanswered
    of = f"paired over {len(values[0]):,} prompts" if paired else "requests resampled"
    return bootstrap_medians(*values, paired=paired), f"{of}, one run each"


def _requests_words(*cells: LoadCell) -> str:
    """Why a load's ratio has no interval."""
    bare = next(cell for cell in cells if cell.each is None)
    return "no single requests recorded" + (f", {bare.requests} in all" if bare.requests is not None else "")


def _request_notes(first: Side, ours: LoadCell, other: Side, theirs: LoadCell) -> tuple[str, ...]:
    """That requests were lost, or that the two had not as many, or not as long prompts."""
    lost = [
        f"{side.name}: {cell.unanswered} of {cell.requests} requests were not answered, and are in no number"
        for side, cell in ((first, ours), (other, theirs))
        if cell.unanswered
    ]
    unlike = [f"{ours.requests} requests against {theirs.requests}"] if ours.requests != theirs.requests else []
    sent = ours.real_input_tokens, theirs.real_input_tokens
    if sent[0] and sent[1] and abs(sent[1] / sent[0] - 1) > _PROMPTS_APART:
        unlike.append(f"prompts of {sent[0]:,.0f} tokens against {sent[1]:,.0f}")
    return (*lost, *unlike)


def asked_notes(*cells: LoadCell) -> tuple[str, ...]:
    """That tokens a second say what was asked for, where every side gave most of that."""
    asked = cells[0].request_rate and cells[0].request_rate * cells[0].output_tokens
    if not asked or any((cell.output_tokens_per_s or 0.0) < ASKED_SHARE * asked for cell in cells):
        return ()
    return (f"not a limit of the servers: {asked:,.0f} tokens/s were asked for",)


def _quality(first: Side, other: Side) -> Iterator[Ratio]:
    theirs = {(score.task, score.name): score for score in other.scores}
    main = next((score.name for score in first.scores if "tuned" in score.name), None)
    for ours in first.scores:
        score = theirs.get((ours.task, ours.name))
        if score is None or not all(is_inside(each.value, own_interval(each)) for each in (ours, score)):
            continue
        interval, of = score_interval(ours, score)
        yield Ratio(
            kind="quality",
            what=ours.name,
            unit="share right",
            first=ours.value,
            other=score.value,
            value=score.value - ours.value,
            is_difference=True,
            better="higher",
            interval=interval,
            interval_of=of,
            main=ours.name == main,
        )


def score_interval(first: SideScore, other: SideScore) -> tuple[Range, str]:
    """The 95 % interval of other - first, and how it was found.

    Paired over questions where both have them one by one; else from the two intervals, as of independent samples
    (Newcombe 1998, Statistics in Medicine 17:873, method 10), which is wider for the same questions.
    """
    shared = [name for name in first.by_question if name in other.by_question]
    if shared and len(shared) == len(first.by_question) == len(other.by_question):
        differences = [other.by_question[name] - first.by_question[name] for name in shared]
        return bootstrap_interval(differences), f"paired over {len(shared):,} questions"
    (low1, high1), (low2, high2) = own_interval(first), own_interval(other)
    difference = other.value - first.value
    below = math.hypot(other.value - low2, high1 - first.value)
    above = math.hypot(high2 - other.value, first.value - low1)
    bound = "" if first.low is not None and other.low is not None else "; at most"
    return (difference - below, difference + above), f"from the two intervals, not paired{bound}"


def own_interval(score: SideScore) -> Range:
    """The score's interval; where none is said, Wilson's of one answer to each question.

    A mean over several answers to each question varies no more than that: p (1 - p) is the largest variance of what
    lies in [0, 1] with the mean p. Where it is said how many questions had all answers right, and how many none, the
    variance is at most that with the others at either end of what is between, and stands for so many more questions.
    """
    if score.low is not None and score.high is not None:
        return score.low, score.high
    share, several = score.value, score.questions
    if score.samples and score.samples > 2 and score.all_right is not None and score.none_right is not None:
        step, between = 1 / score.samples, score.questions - score.all_right - score.none_right
        right = share * score.questions - score.all_right
        high = min(max((right - step * between) / (1 - 2 * step), 0.0), between)
        squares = score.all_right + high * (1 - step) ** 2 + (between - high) * step**2
        several = round(score.questions * share * (1 - share) / (squares / score.questions - share**2))
    return wilson_interval(round(share * several), several)


def _cost(first: Side, other: Side, hours: Sequence[float]) -> Iterator[Ratio]:
    for way in WAYS:
        trained = first.train_usd(way), other.train_usd(way)
        yield from _dollars(f"training, {way}", *trained, pays_for="training", main=way == "on demand")
        if curve := cost_curve(first, other, way):
            for served in hours:
                yield from _dollars(f"training and {served:g} h of serving, {way}", *curve.usd(served))
        for ours, theirs in common_cells(first, other):
            rates = first.serve_rates.get(way), other.serve_rates.get(way)
            if not asked_notes(ours, theirs):
                mine, yours = (
                    rate.usd_per_hour / (cell.output_tokens_per_s * 3600 / 1e6)
                    if rate and cell.output_tokens_per_s
                    else None
                    for rate, cell in zip(rates, (ours, theirs), strict=True)
                )
                yield from _dollars(f"a million output tokens, {ours.load}, {way}", mine, yours, pays_for="serving")


def _dollars(
    what: str, first: float | None, other: float | None, *, pays_for: PaysFor = "both", main: bool = False
) -> Iterator[Ratio]:
    if first is None or other is None or not (first or other):
        return
    yield Ratio(
        kind="cost",
        what=what,
        unit="USD",
        first=first,
        other=other,
        value=other / first if first else None,
        better="lower",
        interval_of="one run each",
        pays_for=pays_for,
        main=main,
        notes=() if first else ("the first costs nothing, so there is no ratio",),
    )
