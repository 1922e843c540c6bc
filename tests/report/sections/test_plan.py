"""The plan against what was measured: memory part by part, and the time of a step."""

import pytest

from gemsmith.report.page import render_page
from gemsmith.report.sections import memory_parts
from gemsmith.runs.plan_records import MachinePlan

GIB = 2**30


def machine(limit):
    return MachinePlan.model_construct(parts={"weights": 3 * GIB, "runtime": GIB}, hbm_limit_bytes_per_chip=limit)


def test_parts_follow_each_other_and_add_up_to_the_plan():
    weights, runtime, planned, used, limit = memory_parts(machine(10 * GIB), 5 * GIB)
    assert (weights[2:4], runtime[2]) == ((0, 0.3), 0.3)
    assert (planned[1], planned[3]) == (4 * GIB, 0.4)
    assert (used[1], *used[3:]) == (5 * GIB, 0.5, "s3")
    assert (limit[3], limit[0]) == (1, "limit of a chip")


def test_what_is_little_of_a_chip_is_not_drawn_as_nothing():
    *_, planned, limit = memory_parts(machine(100 * GIB), None)
    assert planned[3] == 0.5 and limit[3] == 1 and limit[0] == "limit of a chip, beyond the edge"


def test_more_than_a_chip_holds_stands_out():
    *_, used, limit = memory_parts(machine(4 * GIB), 5 * GIB)
    assert used[4] == "bad" and used[3] == 1 and limit[3] == pytest.approx(0.8)


def test_planned_and_used_are_told_of_the_machine_that_trained(large_run, section_words):
    words = section_words(large_run, "plan")
    assert "Memory of a chip of v5p-8, planned and used" in words
    assert "planned in all 51.7 GiB" in words and "used at the peak, measured 55.7 GiB" in words
    assert "below the 3.1–5.0 s of the plan." in words


def test_nothing_is_called_used_where_the_machine_is_not_told(make_run, section_words):
    words = section_words(make_run(steps=3), "plan")
    assert "used" not in words and "median, measured" not in words


def test_what_the_plan_has_no_number_of_has_its_own_reason(large_run, undrawn):
    page = render_page(large_run)
    for reason in ("it does not fit", "the catalog has no spot price", "how many tokens are real is not known"):
        assert f'<abbr title="{reason}">–</abbr>' in page
