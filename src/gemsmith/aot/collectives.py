"""Which chips a collective joins, and over how many links they reach each other."""

import re
from collections.abc import Sequence
from itertools import product
from math import prod

Coordinates = tuple[int, ...]


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
    axes = [int(each) for each in order.split(",")] if order else list(range(len(shape)))
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [
        sum(at * strides[axis] for at, axis in zip(place, axes, strict=True))
        for place in product(*(range(shape[axis]) for axis in axes))
    ]


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
    """source_target_pairs={{0,1},{1,0}} -> ((0, 1), (1, 0))"""
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
