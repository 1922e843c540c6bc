"""The catalog of chips and machines: a dated data file that ships with Gemsmith, and a user's own merged over it.

A name of a machine is its own, a provider's, or a near form such as `h200` for `1xh200`; `2xv6e-16` means two slices of
the TPU machine v6e-16.
"""

import difflib
import math
import os
import re
from calendar import monthrange
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from gemsmith.errors import RecipeError, suggest
from gemsmith.recipe.schema import MOST_DEVICES
from gemsmith.system.yaml import read_yaml

SHIPPED = Path(__file__).with_name("catalog.yaml")
KINDS = ("tpu", "gpu", "cpu")
RowT = TypeVar("RowT")
NamedT = TypeVar("NamedT", "Chip", "Machine")
# Parsing is most of the time that a catalog costs, and LibYAML is ten times faster; not every PyYAML is built with
# it. It ends the process where a file nests too deeply, so a user's own is read in Python.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
OLD_DAYS = 90  # a price read longer ago than this is marked wherever it is used
_MAKERS = re.compile(r"^(?:nvidia|google|gcp|aws|azure|cloud-tpu|tpu)-(?=[a-z])|^tpu(?=v\d)")
_COUNT_FIRST = re.compile(r"(\d+)-?x?-?([a-z].*)")
_SLICES = re.compile(r"([1-9]\d*)-?x-?([a-z0-9].*)")
_COUNT_LAST = re.compile(r"(.+?)-?[x:]-?(\d+)")
_DAYS = re.compile(r"(20\d\d)(?:-(\d\d)(?:-(\d\d))?)?")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator chip, or for kind `cpu` this machine's processor; the head of catalog.yaml explains the keys."""

    name: str
    kind: str
    hbm_bytes: int
    flops_per_s: float
    hbm_bytes_per_s: float
    clock_hz: float | None = None  # what turns a compiler's cycles into seconds; None where no plan reads cycles
    link_bytes_per_s: float | None = None
    dcn_bytes_per_s: float | None = None  # None where slices are not joined
    devices: int = 1  # what JAX calls devices, in one chip
    efficiency_low: float
    efficiency_high: float
    efficiency_source: str
    source: str
    date: str
    checked: bool = True
    also: tuple[str, ...] = ()
    device_kinds: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a machine costs an hour in one region; None where that way of buying it has no price."""

    provider: str
    region: str
    usd_per_hour: float | None = None
    usd_per_hour_spot: float | None = None
    billed_s: float = 1.0
    source: str
    date: str
    checked: bool = True

    def rate(self, *, spot: bool) -> float | None:
        """USD an hour, on demand or on spot."""
        return self.usd_per_hour_spot if spot else self.usd_per_hour

    def times(self, count: int) -> "Price":
        """Of so many machines."""
        rates = self.usd_per_hour, self.usd_per_hour_spot
        hour, spot = (None if rate is None else count * rate for rate in rates)
        source = f"{self.source}, times {count} slices"
        return replace(self, usd_per_hour=hour, usd_per_hour_spot=spot, source=source)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A slice or a server that can be rented whole, or several slices of one kind."""

    name: str
    chip: Chip
    chips: int  # of all slices; so are hosts
    hosts: int = 1
    interconnect_bytes_per_s: float | None = None
    """What one chip can receive from the others of its slice; None for a single chip."""
    source: str
    date: str
    checked: bool = True
    prices: tuple[Price, ...] = ()
    also: tuple[str, ...] = ()
    topology: str = ""  # what libtpu calls it, such as v5p:2x2x1; empty where steps are not compiled for it
    measured_low: float | None = None
    """Share of the peak that matmuls came to in the slowest training measured on it; None: none was."""
    measured_high: float | None = None  # the same of the fastest
    measured_source: str = ""
    measured_date: str = ""
    served_decode_low: float | None = None
    """Share of the roofline that a decode step came to in the slowest of the load tests on it; None: there was none. On
    a CPU, whose row has no peak of its memory, it may be above 1."""
    served_decode_high: float | None = None
    served_prefill_low: float | None = None  # the same of a prompt's prefill
    served_prefill_high: float | None = None
    served_source: str = ""
    served_date: str = ""
    slices: int = field(default=1, metadata={"row": False})
    """Joined by the data center network; within one, chips are joined by their own links."""

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    def times(self, slices: int) -> "Machine":
        """So many of it: chips, hosts and prices of all; nothing is compiled for them or was measured on them."""
        if slices == 1:
            return self
        of_one = ("also", "topology", *MEASURED, *SERVED)
        changed: dict[str, Any] = {item.name: item.default for item in fields(Machine) if item.name in of_one}
        changed |= {"chips": slices * self.chips, "hosts": slices * self.hosts, "slices": slices}
        prices = tuple(price.times(slices) for price in self.prices)
        return replace(self, **changed, name=f"{slices}x{self.name}", prices=prices)


MEASURED, SERVED = (
    tuple(item.name for item in fields(Machine) if item.name.startswith(begin)) for begin in ("measured_", "served_")
)
"""What a machine's row says of trainings that were measured on it, and of load tests: all of either, or none."""


@dataclass(frozen=True, kw_only=True)
class Catalog:
    chips: Mapping[str, Chip]
    machines: Mapping[str, Machine]


def own_catalog() -> Path:
    """The user's rows for all recipes, which need not be there: what `gemsmith plan --calibrate` writes."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "gemsmith" / "machines.yaml"


def load_catalog(path: Path | str | None = None) -> Catalog:
    """The shipped catalog, with the rows of `own_catalog` and then of the file given merged over it by name.

    Raises RecipeError naming hardware.catalog for an unreadable file, an unknown key, a wrong type or a missing source.
    """
    return _merged(files) if (files := own_files(path)) else _shipped()


@cache
def _shipped() -> Catalog:
    return _merged(())


def _merged(files: Iterable[Path]) -> Catalog:
    rows = read_rows(SHIPPED)
    origin: dict[tuple[str, str], Path] = {}
    for file in files:
        for section, own in read_rows(file).items():
            for name, row in own.items():
                # A changed number must not pass under the shipped row's source; prices and measurements have theirs.
                numbers = sorted(str(key) for key in row if key not in ("prices", *MEASURED, *SERVED))
                if numbers and not {"source", "date"} <= set(row):
                    raise RecipeError(
                        f"hardware.catalog {file}: {section}.{name}: must say source and date, since it gives "
                        f"{', '.join(numbers)}"
                    )
                rows[section][name] = {**rows[section].get(name, {}), **row}
                origin[section, name] = file

    def where(section: str, name: str) -> str:
        return f"hardware.catalog {origin.get((section, name), SHIPPED)}: {section}.{name}"

    chips = {name: _chip(name, row, where("chips", name)) for name, row in rows["chips"].items()}
    machines = {name: _machine(name, row, chips, where("machines", name)) for name, row in rows["machines"].items()}
    return Catalog(chips=chips, machines=machines)


def own_files(path: Path | str | None) -> list[Path]:
    """The files whose rows are merged over the shipped ones, the last over all before it."""
    own = own_catalog()
    return [*([own] if own.exists() else []), *([] if path is None else [Path(path)])]


def read_rows(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """A file's rows by section and name, not yet checked. Raises RecipeError for what is no catalog."""
    values = read_yaml(path, f"hardware.catalog {path}", _Base if path == SHIPPED else yaml.SafeLoader)
    if not isinstance(values, dict):
        raise RecipeError(f"hardware.catalog {path}: must be a mapping of chips and machines")
    rows: dict[str, dict[str, dict[str, Any]]] = {"chips": {}, "machines": {}}
    for section, named in values.items():
        if section not in rows:
            raise RecipeError(
                f"hardware.catalog {path}: unknown key {section}{suggest(str(section), rows)}; allowed: chips, machines"
            )
        if not isinstance(named, dict) or not all(isinstance(row, dict) for row in named.values()):
            raise RecipeError(f"hardware.catalog {path}: {section} must map names to rows of key: value")
        rows[section] = {str(name): row for name, row in named.items()}
    return rows


def _chip(name: str, row: Mapping[str, Any], where: str) -> Chip:
    row = dict(row)
    if row.get("kind") not in KINDS:
        raise RecipeError(f"{where}.kind: {row.get('kind')!r} was given; allowed: {', '.join(KINDS)}")
    if row["kind"] == "cpu":
        if row.get("hbm_bytes") is None:
            row["hbm_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for key in ("flops_per_s", "hbm_bytes_per_s"):  # of one core
            if isinstance(row.get(key), float):
                row[key] *= os.cpu_count() or 1
    chip = _build(Chip, {"name": name, **row}, where)
    if not 0 < chip.efficiency_low <= chip.efficiency_high <= 1:
        raise RecipeError(f"{where}: efficiency_low and efficiency_high must be in order, above 0 and at most 1")
    return chip


def _machine(name: str, row: Mapping[str, Any], chips: Mapping[str, Chip], where: str) -> Machine:
    if row.get("chip") not in chips:
        raise RecipeError(
            f"{where}.chip: {row.get('chip')!r} is not in the catalog{suggest(str(row.get('chip')), chips)}; "
            f"allowed: {', '.join(chips)}"
        )
    prices = row.get("prices", [])
    if not isinstance(prices, list) or not all(isinstance(price, dict) for price in prices):
        raise RecipeError(
            f"{where}.prices: must be a list of rows with provider, region, usd_per_hour, source and date"
        )
    built = tuple(_build(Price, price, f"{where}.prices[{index}]") for index, price in enumerate(prices))
    machine = _build(Machine, {"name": name, **row, "chip": chips[row["chip"]], "prices": built}, where)
    if machine.devices > 1 and machine.interconnect_bytes_per_s is None:
        raise RecipeError(
            f"{where}.interconnect_bytes_per_s is missing; a machine of {machine.devices} devices must have it"
        )
    _check_shares(machine, row, where, MEASURED, most=1)
    _check_shares(machine, row, where, SERVED, most=math.inf if machine.chip.kind == "cpu" else 1)
    return machine


def _check_shares(machine: Machine, row: Mapping[str, Any], where: str, keys: tuple[str, ...], *, most: float) -> None:
    """All keys or none; each pair of low and high in order."""
    given = [key for key in keys if key in row]
    if given and len(given) < len(keys):
        missing = next(key for key in keys if key not in row)
        raise RecipeError(f"{where}.{missing} is missing; it goes with {given[0]}")
    for low in (key for key in given if key.endswith("_low")):
        high = low.replace("_low", "_high")
        if not 0 < (getattr(machine, low) or 0) <= (getattr(machine, high) or 0) <= most:
            limit = " and at most 1" if most == 1 else ""
            raise RecipeError(f"{where}: {low} and {high} must be in order, above 0{limit}")


def _build(kind: type[RowT], values: Mapping[str, Any], where: str) -> RowT:
    """A row as its dataclass, each key and type checked; numbers must be above zero, prices not below."""
    known = {item.name: item for item in fields(kind) if item.metadata.get("row", True)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            allowed = [name for name in known if name != "name"]
            raise RecipeError(f"{where}: unknown key {key}{suggest(str(key), allowed)}; allowed: {', '.join(allowed)}")
    for name, item in known.items():
        if name not in values and item.default is MISSING:
            raise RecipeError(f"{where}.{name} is missing; it must be given")
    return kind(**{name: _value(known[name].type, value, f"{where}.{name}") for name, value in values.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if kind == tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise RecipeError(f"{where}: {value!r} was given; must be a list of names")
        return tuple(name.lower() for name in value)
    if kind == float | None and value is None:
        return None
    if kind in (int, float, float | None):
        is_price = "usd" in where
        least = "a whole number above zero" if kind is int else f"a number, {'not below' if is_price else 'above'} zero"
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and not is_price) or (kind is int and value != int(value)):
            null = ", or null" if kind == float | None else ""
            raise RecipeError(f"{where}: {value!r} was given; must be {least}{null}")
        return int(value) if kind is int else float(value)
    if kind in (str, bool) and not isinstance(value, kind):
        words = "text; quote it" if kind is str else "true or false"
        raise RecipeError(f"{where}: {value!r} was given; must be {words}")
    if kind is str and not value.strip():
        raise RecipeError(f"{where}: {value!r} was given; must say something")
    return value


def billed_hours(price: Price, hours: float) -> float:
    """The hours that are paid for: rounded up to what the seller bills.

    >>> round(billed_hours(Price(provider="p", region="r", source="s", date="2026", billed_s=60), 0.51), 4)
    0.5167
    """
    # Rounded first: 2 hours in seconds may come out as 7200.000000001.
    return math.ceil(round(3600 * hours / price.billed_s, 6)) * price.billed_s / 3600


def doubts_of(price: Price, today: date) -> tuple[str, ...]:
    """What to say of a price: that nobody checked it, that it is old or may be; empty where there is no doubt."""
    doubts = [] if price.checked else ["not checked"]
    span = _span(price.date)
    if span is None:
        doubts.append("of an unknown date")
    elif (today - span[1]).days > OLD_DAYS:
        doubts.append(f"older than {OLD_DAYS} days")
    elif (today - span[0]).days > OLD_DAYS:
        doubts.append(f"perhaps older than {OLD_DAYS} days")
    return tuple(doubts)


def _span(text: str) -> tuple[date, date] | None:
    """The first and the last day that a date may mean: a year alone is all of it, of several dates the last counts.

    >>> _span("2026-03 to 2026-05")
    (datetime.date(2026, 5, 1), datetime.date(2026, 5, 31))
    """
    found = _DAYS.findall(text)
    if not found:
        return None
    year, month, day = (int(part or 0) for part in found[-1])
    try:
        return date(year, month or 1, day or 1), date(year, month or 12, day or monthrange(year, month or 12)[1])
    except ValueError:  # such as a 13th month
        return None


def find_machine(catalog: Catalog, name: str, key: str = "hardware.machines") -> Machine:
    """The machine that the name means. Raises RecipeError with the names that exist, the near ones first.

    Counts may stand before a GPU's name or behind it; a chip's name alone means the smallest machine of it. A count and
    an x before a TPU machine's name means so many slices; of other machines there are none.
    """
    found = match_machine(catalog, name)
    if found is None and (several := _several(catalog, name)) and several[0].chip.kind != "tpu":
        raise RecipeError(f"{key}: {name!r} was given; only TPUs have several slices, name one {several[0].name}")
    if found is None:
        known = catalog.machines
        near = difflib.get_close_matches(_plain(name), [*known, *catalog.chips], n=3, cutoff=0.6)
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise RecipeError(
            f"{key}: {name!r} is not in the catalog{meant}; allowed: {', '.join(known)}; add others in hardware.catalog"
        )
    if found.devices > MOST_DEVICES:
        raise RecipeError(f"{key}: {name!r} has {found.devices:,} devices; allowed are {MOST_DEVICES:,}")
    if found.slices > 1 and found.chip.dcn_bytes_per_s is None:
        raise RecipeError(f"hardware.catalog: chips.{found.chip.name}.dcn_bytes_per_s is missing; {name!r} needs it")
    return found


def match_machine(catalog: Catalog, name: str) -> Machine | None:
    """The same, or None where no machine is meant."""
    if name in catalog.machines:
        return catalog.machines[name]
    text = _plain(name)
    if machine := _called(catalog.machines, text):
        return machine
    chip, count = _chip_and_count(catalog, text)
    machines = [machine for machine in catalog.machines.values() if machine.chip == chip]
    if count is not None:
        return next((machine for machine in machines if machine.chips == count), None)
    if machines:
        return min(machines, key=lambda machine: machine.chips)
    several = _several(catalog, name)
    return several[0].times(several[1]) if several and several[0].chip.kind == "tpu" else None


def _several(catalog: Catalog, name: str) -> tuple[Machine, int] | None:
    """A machine named in full, and the count before it; an `8xh100` has its own row, and `3xh100` names no machine."""
    match = _SLICES.fullmatch(_plain(name))
    if match is None:
        return None
    machine = _called(catalog.machines, _MAKERS.sub("", match[2]))
    return None if machine is None else (machine, int(match[1]))


def machines_with(catalog: Catalog, devices: Sequence[str], planned: Sequence[str] = ()) -> list[Machine]:
    """The machines that have just these devices, as drivers call them; of none, those without accelerators.

    Where any of the `planned` has them, those alone: they may be several slices, which have no row of their own.
    """
    kinds = {device.lower() for device in devices}
    named = [machine for name in planned if (machine := match_machine(catalog, name))]
    for machines in (named, catalog.machines.values()):
        alike = (each for each in machines if (each.devices == len(devices) if kinds else each.chip.kind == "cpu"))
        if found := [machine for machine in alike if kinds <= set(machine.chip.device_kinds)]:
            return found
    return []


def _called(rows: Mapping[str, NamedT], text: str) -> NamedT | None:
    return next((row for row in rows.values() if text == row.name.lower() or text in row.also), None)


def _plain(name: str) -> str:
    text = re.sub(r"[\s_]+", "-", name.strip().lower().replace("×", "x").replace("*", "x"))
    return _MAKERS.sub("", text)


def _chip_and_count(catalog: Catalog, text: str) -> tuple[Chip | None, int | None]:
    """The chip that is named, and how many of it; of a TPU no count is understood, since some names count cores."""
    if chip := _called(catalog.chips, text):
        return chip, None
    for pattern, chip_at, count_at in ((_COUNT_FIRST, 2, 1), (_COUNT_LAST, 1, 2)):
        match = pattern.fullmatch(text)
        chip = _called(catalog.chips, _MAKERS.sub("", match[chip_at])) if match else None
        if match and chip and chip.kind == "gpu":
            return chip, int(match[count_at])
    return None, None
