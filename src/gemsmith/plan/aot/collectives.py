"""What a compiled program moves: over which links a collective goes, what is on its way, bytes of one operation."""

import itertools
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np

from gemsmith.plan.aot.hlo import HBM, Array, Computation, Instruction, Module

Coordinates = tuple[int, ...]
_ALIASES = ("bitcast", "reshape", "get-tuple-element")
_SLICES = ("dynamic-slice", "slice", "gather")
# Place of the update among the operands; operand 0 is changed where it lies.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_UNREAD = ("tuple", "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def read_group(attributes: str, partitions: int) -> tuple[int, ...]:
    """The partitions of an operation's first group, from any of the forms that XLA prints.

    {{0,1},{2,3}} -> (0, 1); [2,4]<=[8] -> (0, 1, 2, 3); [4,2]<=[2,4]T(1,0) -> (0, 4); mesh['a'=2,'b'=4] {'a'} -> (0, 4)
    """
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return tuple(int(each) for each in listed[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        return tuple(_transposed(iota[3], iota[4])[: int(iota[2])])
    mesh = re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\]([^{]*)\{([^}]*)\}", attributes)
    if mesh:
        return _mesh_group(mesh[1], mesh[2], mesh[3])
    return tuple(range(partitions))


def _transposed(sizes: str, order: str | None) -> list[int]:
    shape = [int(each) for each in sizes.split(",")]
    axes = [int(each) for each in order.split(",")] if order else range(len(shape))
    numbers: list[int] = np.arange(prod(shape)).reshape(shape).transpose(axes).ravel().tolist()
    return numbers


def _mesh_group(axes: str, devices: str, chosen: str) -> tuple[int, ...]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    strides = {name: prod(list(sizes.values())[place + 1 :]) for place, name in enumerate(sizes)}
    offsets = []
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen):
        size = int(part) if part else sizes[name]
        step = strides[name] * (sizes[name] // (int(before) * size) if part else 1)
        offsets.append([at * step for at in range(size)])
    places = [sum(each) for each in product(*offsets)]
    order = re.search(r"\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", devices)
    if order:
        numbers = _transposed(order[1], order[2])
        return tuple(numbers[place] for place in places)
    listed = re.search(r"\(([\d,]+)\)", devices)
    return tuple(int(listed[1].split(",")[place]) for place in places) if listed else tuple(places)


def read_pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", found[1] if found else ""))


def links_of(group: Sequence[int], coordinates: Sequence[Coordinates]) -> int:
    """Links to chips of its own group that the worst placed chip of a group has, at least one.

    Without coordinates two chips have one link, more have two: a corner of a square, or a ring.
    """
    if not coordinates:
        return 1 if len(group) <= 2 else 2
    places = [coordinates[each] for each in group]
    return max(1, min(sum(_distance(one, other) == 1 for other in places) for one in places))


def hops_of(pairs: Sequence[tuple[int, int]], coordinates: Sequence[Coordinates]) -> int:
    """The longest way of a permutation, in links; no link joins the two ends of a row."""
    return max((_distance(coordinates[a], coordinates[b]) for a, b in pairs if a != b), default=1) if coordinates else 1


def _distance(one: Coordinates, other: Coordinates) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@dataclass
class Transfer:
    """On its way beside the core: `left` seconds of its engine."""

    engine: str
    left: float
    place: int  # among the operations
    steps: int = 0  # of a ring that the core passes on; 0 where nothing waits for the core

    def __post_init__(self) -> None:
        self._step = self._arriving = self.left / (self.steps or 1)

    def go_on(self, seconds: float, *, passed_on: bool) -> float:
        """What it takes of that time."""
        taken = min(seconds, self.left)
        if self.steps and passed_on:
            self._arriving = self._step - (self._step * self.steps - self.left + taken) % self._step
        elif self.steps:
            taken = min(taken, self._arriving)
            self._arriving -= taken
        self.left -= taken
        return taken


@dataclass
class EngineClock:
    """The time of one computation's run, and what is on its way. An engine takes one transfer after the other."""

    now: float = 0.0
    pending: dict[str, Transfer] = field(default_factory=dict)
    """By engine and name or channel, in the order of their starts."""
    outside: frozenset[str] = frozenset()  # what the caller has under way

    def spend(self, seconds: float, *, memory_s: float = 0.0, passes_on: Container[str] = (), taken: str = "") -> None:
        """The core works or waits; copies lose the bandwidth it takes, transfers the engine that it has `taken`."""
        self.now += seconds
        room = {taken: 0.0, "copy": seconds - min(memory_s, self.queued("copy"))}
        for key, each in self.pending.items():
            left = room.get(each.engine, seconds)
            room[each.engine] = left - each.go_on(left, passed_on=key in passes_on)

    def queued(self, engine: str, until: Transfer | None = None) -> float:
        """What the engine has to do on its own, up to a transfer."""
        before = itertools.takewhile(lambda each: each is not until, self.pending.values())
        return sum(each.left for each in before if each.engine == engine and not each.steps)

    def finish(self, key: str) -> float:
        """Waits for what is on its way, and says how long."""
        each = self.pending[key]
        waited = each.left + (0.0 if each.steps else self.queued(each.engine, until=each))
        self.spend(waited, passes_on=(key,))
        del self.pending[key]
        return waited


def traffic_of(each: Instruction, module: Module) -> int:
    """Bytes read and written in the chip's own memory; arrays in on-chip memory and on the host cost none."""
    if each.opcode == "fusion":
        body = module.computations[each.called[0]]
        moved = 0
        for place, source in enumerate(each.inputs):
            if len(source.arrays) == 1 and source.arrays[0].space == HBM:
                moved += min(source.arrays[0].bytes, _used(body.parameters[place], body, module))
        results = body.root.inputs if body.root.opcode == "tuple" else [body.root] * len(body.root.arrays)
        return moved + sum(_written(result, array, module) for result, array in zip(results, each.arrays, strict=True))
    written = sum(map(_in_hbm, each.arrays))
    if each.opcode in _SLICES:
        return written + min(_in_hbm(each.inputs[0].arrays[0]), each.arrays[0].bytes)
    if each.opcode in _UPDATES:
        update = each.inputs[_UPDATES[each.opcode]].arrays[0]
        return _in_hbm(update) + (update.bytes if each.arrays[0].space == HBM else 0)
    return written + sum(_in_hbm(array) for source in each.inputs for array in source.arrays)


def _in_hbm(array: Array) -> int:
    return array.bytes if array.space == HBM else 0


def _used(value: Instruction, body: Computation, module: Module) -> int:
    """Bytes of a value that a fusion's computation looks at."""
    total = 0
    for user in body.users.get(value.name, ()):
        if user.opcode in _ALIASES:
            total += _used(user, body, module)
        elif user.opcode in _SLICES and user.operands[0] == value.name:
            total += user.arrays[0].bytes
        elif (
            (user.opcode in _UPDATES and user.operands[0] == value.name)
            or user.opcode in _UNREAD
            or "AsyncCollective" in user.attributes
        ):
            continue
        elif user.opcode == "fusion":
            inner = module.computations[user.called[0]]
            places = (at for at, name in enumerate(user.operands) if name == value.name)
            total += sum(_used(inner.parameters[at], inner, module) for at in places)
        else:
            return value.arrays[0].bytes
    return total


def _written(result: Instruction, array: Array, module: Module) -> int:
    """Bytes of one result that are new: an update's, where a buffer is changed in place, none of a passed parameter."""
    if array.space != HBM:
        return 0
    while result.opcode in _ALIASES:
        result = result.inputs[0]
    if result.opcode == "parameter" or result.opcode in _UNREAD:
        return 0
    if result.opcode in _UPDATES:
        return result.inputs[_UPDATES[result.opcode]].arrays[0].bytes
    if result.opcode == "fusion" and len(result.arrays) == 1:
        return _written(module.computations[result.called[0]].root, array, module)
    return array.bytes
