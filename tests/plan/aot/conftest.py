"""Shared by the tests of compiled programs: programs of a few lines, and one that XLA compiled.

golden/scan_v5p.hlo: XLA's text for v5p:2x2x1, layouts and cycles kept, Mosaic's code taken out, of a scan over 6
layers of x + attention(x), then x + relu(x U) D, with x (4, 2048, 1024) split by rows, U (1024, 4096) and D (4096,
1024) split over the chips.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from gemsmith.hardware import load_catalog
from gemsmith.plan.aot.timeline import Costs, Operation, walk

GOLDEN = Path(__file__).parent / "golden"
CHIP = load_catalog().chips["v5p"]
SQUARE = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0))


@pytest.fixture(scope="session")
def scan() -> str:
    return (GOLDEN / "scan_v5p.hlo").read_text()


@pytest.fixture(scope="session")
def costs(scan: str) -> Costs:
    return walk(scan, CHIP, coordinates=SQUARE)


@pytest.fixture(scope="session")
def module() -> Callable[..., str]:
    """Returns a scheduled module with one entry: `module(body, *others)`; `body` are its lines, `others` whole
    computations."""

    def make(body: str, *others: str, partitions: int = 4) -> str:
        lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
        return f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n" + "".join(
            f"{other.strip()}\n\n" for other in (*others, f"ENTRY %main (a: f32[]) -> f32[] {{\n{lines}\n}}")
        )

    return make


@pytest.fixture(scope="session")
def only() -> Callable[[str], Operation]:
    """Returns the one operation of a module that takes time: `only(text)`."""

    def find(text: str) -> Operation:
        (operation,) = (each for each in walk(text, CHIP).operations if each.busy_s)
        return operation

    return find


@pytest.fixture(scope="session")
def named() -> Callable[[Costs, str], Operation]:
    """Returns the operation of that name: `named(costs, "fusion.4")`."""

    def find(costs: Costs, name: str) -> Operation:
        return next(each for each in costs.operations if each.name == name)

    return find
