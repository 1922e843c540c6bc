"""Training and N hours of serving: what both cost, and from when on which is cheaper."""

from gemsmith.compare.side import Rate, Side, Way
from gemsmith.records import Part


class Curve(Part):
    """The dollars of two sides against hours of serving: trained + rate × hours for each."""

    way: Way
    trained_usd: tuple[float, float]
    usd_per_hour: tuple[float, float]
    machines: tuple[str, str]
    break_even_hours: float | None
    """Where the two cost the same; None: at no time after the start."""

    def usd(self, hours: float) -> tuple[float, float]:
        """What the two cost by then."""
        (first, other), (rate, rate_other) = self.trained_usd, self.usd_per_hour
        return first + rate * hours, other + rate_other * hours

    def ratio(self, hours: float) -> float | None:
        """Other / first; None where the first costs nothing."""
        first, other = self.usd(hours)
        return other / first if first else None

    def say(self, first: str, other: str) -> str:
        """Which is cheaper, and from when on."""
        names = (first, other)
        start, end = self._cheaper(self.trained_usd), self._cheaper(self.usd_per_hour)
        if self.break_even_hours is not None and start is not None and end is not None:
            return (
                f"{names[start]} is cheaper up to {self.break_even_hours:.3g} h of serving, {names[end]} from then on."
            )
        cheaper = start if start is not None else end
        if cheaper is None:
            return "Both cost the same at any time."
        ends = self.ratio_at_the_end()
        towards = "" if ends is None else f"; {other} / {first} goes from {self.ratio(0):.3g} to {ends:.3g}"
        return f"{names[cheaper]} is cheaper at any time{towards if self.trained_usd[0] else ''}."

    def ratio_at_the_end(self) -> float | None:
        """What other / first comes to after ever more hours."""
        first, other = self.usd_per_hour
        return other / first if first else None

    @staticmethod
    def _cheaper(pair: tuple[float, float]) -> int | None:
        return None if pair[0] == pair[1] else int(pair[1] < pair[0])


def cost_curve(first: Side, other: Side, way: Way) -> Curve | None:
    """The curve; None where a side's hours or prices are not recorded, or neither pays anything."""
    trained = first.train_usd(way), other.train_usd(way)
    rates = first.serve_rates.get(way), other.serve_rates.get(way)
    if trained[0] is None or trained[1] is None or rates[0] is None or rates[1] is None:
        return None
    if not any((*trained, rates[0].usd_per_hour, rates[1].usd_per_hour)):
        return None
    return Curve(
        way=way,
        trained_usd=(trained[0], trained[1]),
        usd_per_hour=(rates[0].usd_per_hour, rates[1].usd_per_hour),
        machines=(_machines(first, rates[0], way), _machines(other, rates[1], way)),
        break_even_hours=break_even(trained[0], trained[1], rates[0].usd_per_hour, rates[1].usd_per_hour),
    )


def break_even(trained: float, trained_other: float, rate: float, rate_other: float) -> float | None:
    """The hours of serving after which both cost the same; None where that is never.

    >>> break_even(56.11, 119.23, 25.92, 22.12), break_even(56.11, 119.23, 21.52, 22.12)
    (16.610526315789475, None)
    """
    if rate == rate_other:
        return None
    hours = (trained_other - trained) / (rate - rate_other)
    return hours if hours > 0 else None


def _machines(side: Side, serve: Rate, way: Way) -> str:
    trained = side.train_rates[way]
    return (
        f"trained on {trained.machine} at {trained.usd_per_hour:.2f} USD/h, served on {serve.machine} at "
        f"{serve.usd_per_hour:.2f} USD/h"
    )
