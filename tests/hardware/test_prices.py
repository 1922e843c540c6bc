from datetime import date

import pytest

from gemsmith.hardware.catalog import Price, billed_hours, doubts_of, load_catalog
from support.cases import each

TODAY = date(2026, 11, 23)


def price(day="2026-11-01", **values):
    return Price(**{"provider": "p", "region": "r", "source": "s", "date": day} | values)


@each(
    ("day", "doubts"),
    [
        ("2026-11-01", ()),
        ("2026-08-25", ()),
        ("2026-08-24", ("older than 90 days",)),
        ("2026-03 to 2026-05", ("older than 90 days",)),
        ("2026-08", ("perhaps older than 90 days",)),
        ("2026", ("perhaps older than 90 days",)),
        ("2026, autumn", ("perhaps older than 90 days",)),
        ("2025", ("older than 90 days",)),
        ("last week", ("of an unknown date",)),
        ("2026-13", ("of an unknown date",)),
    ],
)
def test_an_old_price_is_marked(day, doubts):
    assert doubts_of(price(day), TODAY) == doubts


def test_a_price_that_nobody_checked_is_marked():
    assert doubts_of(price(checked=False), TODAY) == ("not checked",)


def test_what_is_billed_by_the_minute_is_rounded_up_to_it():
    assert billed_hours(price(billed_s=60), 2.0) == 2.0
    assert billed_hours(price(billed_s=60), 2.0001) == pytest.approx(2 + 1 / 60)
    assert billed_hours(price(), 1.00001) == pytest.approx(3601 / 3600)


def test_cloud_run_costs_its_gpu_its_cores_and_its_memory_by_the_minute():
    for vcpus, gib in ((20, 80), (30, 120), (44, 176)):
        row = load_catalog().machines[f"cloud-run-{vcpus}"].prices[0]
        assert row.billed_s == 60
        assert row.usd_per_hour == pytest.approx(3600 * (0.00036522 + 0.000018 * vcpus + 0.000002 * gib), abs=0.005)


def test_prices_by_the_chip_agree_with_the_row_they_are_from():
    machines = load_catalog().machines
    for name, other in (("v5p-16", "v5p-8"), ("v5p-32", "v5p-8"), ("v6e-1", "v6e-8"), ("v6e-16", "v6e-8")):
        ours, theirs = machines[name], machines[other]
        assert ours.prices[0].usd_per_hour / ours.chips == pytest.approx(theirs.prices[0].usd_per_hour / theirs.chips)
        assert not ours.prices[0].checked
