"""How numbers are written."""

import doctest
import math

import pytest

from gemsmith.report import charts as curves
from gemsmith.report import scores as examples
from gemsmith.report import sections as training
from gemsmith.system import format as numbers


@pytest.mark.parametrize("module", [numbers, curves, examples, training])
def test_examples_in_the_docstrings_hold(module):
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_said_to_be_so(value):
    writers = (
        numbers.decimal,
        numbers.plain,
        numbers.count,
        numbers.fraction,
        numbers.percent,
        numbers.duration,
        numbers.rough,
        numbers.usd,
    )
    assert {write(value) for write in writers} == {"not finite"}
