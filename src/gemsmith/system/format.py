"""How numbers are written for a reader: three digits that matter, units, no-break spaces."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime

_NBSP = "\u00a0"


def decimal(value: float) -> str:
    """About three digits that matter.

    >>> [decimal(value) for value in (1244, 763.4, 18.72, 0.3127, 1e-5, 0)]
    ['1,244', '763', '18.7', '0.313', '1e-5', '0']
    """
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for limit, digits in ((0.1, 4), (1, 3), (10, 2), (100, 1)):
        # Rounded first, so that 9.999 is written 10.0 and not 10.00.
        if round(size, digits) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def plain(value: float) -> str:
    """A setting as its author would write it: no zeros added, none lost.

    >>> [plain(value) for value in (64.0, 0.05, 1e-4, 1e-8, 16)]
    ['64', '0.05', '0.0001', '1e-8', '16']
    """
    if not math.isfinite(value):
        return "not finite"
    text = f"{value:.10g}"
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else text


def rate(value: float, at_once: int | None = None) -> str:
    """A load of a server: the rate of its requests, and how many are under way at once.

    >>> rate(4.0), rate(math.inf), rate(math.inf, 64), rate(4.0, 64)
    ('4 requests/s', 'a burst', '64 at once', '4 requests/s, 64 at once')
    """
    if math.isinf(value):
        return "a burst" if at_once is None else f"{at_once} at once"
    return f"{plain(value)} requests/s" + ("" if at_once is None else f", {at_once} at once")


def count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "not finite"


def counts(found: Mapping[str, int]) -> str:
    """How many there are of each, the most frequent first.

    >>> counts({"timeout": 1, "http 500": 1200})
    '1,200 http 500, 1 timeout'
    """
    return ", ".join(f"{number:,} {what}" for what, number in sorted(found.items(), key=lambda each: -each[1]))


def fraction(value: float) -> str:
    """A score: three decimals."""
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def interval(low: float, high: float) -> str:
    """The two ends of an interval of scores."""
    return f"{fraction(low)}–{fraction(high)}"


def percent(value: float) -> str:
    """A share of 1 in percent.

    >>> percent(0.9712).replace(_NBSP, " "), percent(0.0004).replace(_NBSP, " ")
    ('97.1 %', '0.04 %')
    """
    digits = 2 if 0 < abs(value) < 0.001 else 1
    return f"{100 * value:.{digits}f}{_NBSP}%" if math.isfinite(value) else "not finite"


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> [duration(value).replace(_NBSP, " ") for value in (0.042, 43.21, 312, 12024)]
    ['42 ms', '43.2 s', '5 min 12 s', '3 h 20 min']
    """
    if not math.isfinite(seconds):
        return "not finite"
    if seconds < 1:
        return f"{1000 * seconds:.0f}{_NBSP}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}{_NBSP}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}{_NBSP}min" + (f" {whole % 60}{_NBSP}s" if whole % 60 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60}{_NBSP}h" + (f" {minutes % 60}{_NBSP}min" if minutes % 60 else "")


def rough(seconds: float) -> str:
    """Seconds of a model, in one unit and with two digits: more would claim what a formula does not know.

    >>> [rough(value).replace(_NBSP, " ") for value in (0.0123, 0.449, 3.14, 964, 12024, 252_000)]
    ['12 ms', '450 ms', '3.1 s', '16 min', '3.3 h', '70 h']
    """
    if not math.isfinite(seconds):
        return "not finite"
    if 0 < seconds < 0.995:
        return f"{float(f'{1000 * seconds:.2g}'):g}{_NBSP}ms"
    unit, length = ("s", 1) if seconds < 99.5 else ("min", 60) if seconds < 99.5 * 60 else ("h", 3600)
    value = seconds / length
    return f"{value:.1f}{_NBSP}{unit}" if value < 9.95 else f"{value:,.0f}{_NBSP}{unit}"


def rough_hours(hours: float) -> str:
    """The same of hours."""
    return rough(3600 * hours)


def size(value: float) -> str:
    """Bytes of files, in decimal units.

    >>> size(62_540_000_000).replace(_NBSP, " "), size(640).replace(_NBSP, " ")
    ('62.5 GB', '640 B')
    """
    return _scaled(value, 1000, ("B", "kB", "MB", "GB", "TB"))


def memory(value: float) -> str:
    """Bytes of memory, in binary units."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def usd(value: float) -> str:
    """Dollars; cents below a thousand.

    >>> usd(56.114), usd(12_345.6)
    ('$56.11', '$12,346')
    """
    digits = 2 if abs(value) < 1000 else 0
    return f"${value:,.{digits}f}" if math.isfinite(value) else "not finite"


def price(value: float) -> str:
    """Dollars of a unit, such as a million tokens: three digits that matter, at least cents.

    >>> price(6.104), price(0.01234), price(0)
    ('$6.10', '$0.0123', '$0.00')
    """
    return f"${decimal(value)}" if 0 < abs(value) < 1 else usd(value)


def signed(value: float) -> str:
    """A difference of scores.

    >>> signed(0.975), signed(-0.01), signed(0)
    ('+0.975', '−0.010', '0.000')
    """
    sign = "" if not value or math.isnan(value) else "+" if value > 0 else "−"
    return sign + fraction(abs(value))


def p_value(value: float) -> str:
    """How likely chance alone is.

    >>> p_value(0.0312), p_value(4e-11), p_value(1)
    ('p = 0.031', 'p < 0.001', 'p = 1')
    """
    if not math.isfinite(value):
        return "p not finite"
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def span(low: str, high: str) -> str:
    """A range, with a unit that both ends share written once; the one value where both read the same.

    >>> span("$4.50", "$7.20"), span(f"3.1{_NBSP}s", f"5.0{_NBSP}s").replace(_NBSP, " "), span("4", "4")
    ('$4.50–7.20', '3.1–5.0 s', '4')
    """
    if low == high:
        return low
    if low.startswith("$") and high.startswith("$"):
        return f"{low}–{high[1:]}"
    number, _, unit = low.partition(_NBSP)
    if unit and " " not in unit and high.partition(_NBSP)[2] == unit:
        return f"{number}–{high}"
    return f"{low} – {high}" if unit else f"{low}–{high}"


def short_hash(value: str) -> str:
    return value[:12]


def mesh(axes: Mapping[str, int]) -> str:
    """The axes along which there is more than one device.

    >>> mesh({"replica": 1, "fsdp": 4, "tp": 2}), mesh({"fsdp": 1}), mesh({})
    ('fsdp 4 × tp 2', 'one device', 'not recorded')
    """
    if not axes:
        return "not recorded"
    return " × ".join(f"{name} {size}" for name, size in axes.items() if size != 1) or "one device"


def moment(text: str) -> str:
    """An ISO 8601 time in UTC, to the minute; what is not one is returned as it is."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return text
    if when.tzinfo is not None:
        when = when.astimezone(UTC)
    return f"{when:%Y-%m-%d %H:%M}{_NBSP}UTC"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(value) < base:
            return f"{decimal(value)}{_NBSP}{unit}"
        value /= base
    return f"{decimal(value)}{_NBSP}{units[-1]}"
