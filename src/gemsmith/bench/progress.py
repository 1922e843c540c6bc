"""How long what is left of a sweep takes, from what has been measured of it."""

from collections.abc import Sequence

from gemsmith.bench.cells import Ask
from gemsmith.bench_records import BenchCell


def expected_s(ask: Ask, done: Sequence[BenchCell]) -> float:
    """Seconds of a cell: those in which its requests arrive, or in which they are answered where that takes longer.

    They are answered at the highest speed seen with prompts of that length, else with any.
    """
    arrivals_s = ask.requests / ask.load.request_rate
    same = [cell for cell in done if cell.input_tokens == ask.load.input_tokens]
    fastest = max((cell.output_tokens_per_s for cell in same or done), default=0.0)
    answers_s = ask.requests * ask.load.output_tokens / fastest if fastest else 0.0
    return max(arrivals_s, answers_s)


def say_left(seconds: float) -> str:
    """Seconds as a person says what is left.

    >>> say_left(8), say_left(95), say_left(7000)
    ('about 8 s left', 'about 2 min left', 'about 1.9 h left')
    """
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3600:.1f} h left"
