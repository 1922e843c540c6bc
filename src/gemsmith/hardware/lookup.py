"""Which machine of the catalog a name means: its own, a provider's, or a near form such as `h200` for `1xh200`.

`2xv6e-16` means two slices of the TPU machine v6e-16.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from gemsmith.errors import RecipeError
from gemsmith.hardware.catalog import Catalog, Chip, Machine

RowT = TypeVar("RowT", Chip, Machine)
_MAKERS = re.compile(r"^(?:nvidia|google|gcp|aws|azure|cloud-tpu|tpu)-(?=[a-z])|^tpu(?=v\d)")
_COUNT_FIRST = re.compile(r"(\d+)-?x?-?([a-z].*)")
_SLICES = re.compile(r"([1-9]\d*)-?x-?([a-z0-9].*)")
_COUNT_LAST = re.compile(r"(.+?)-?[x:]-?(\d+)")


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
    machines = [machine for machine in catalog.machines.values() if chip is not None and machine.chip == chip]
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


def _called(rows: Mapping[str, RowT], text: str) -> RowT | None:
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
