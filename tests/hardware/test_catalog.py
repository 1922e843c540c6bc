import os
import re

import pytest

from gemsmith.errors import RecipeError
from gemsmith.hardware import find_machine, load_catalog
from gemsmith.hardware.catalog import KINDS, own_catalog, own_files
from support.cases import each

GIB = 2**30


@pytest.fixture
def own(tmp_path):
    def write(text):
        file = tmp_path / "own.yaml"
        file.write_text(text)
        return file

    return write


def test_every_shipped_row_has_a_source_and_a_date():
    catalog = load_catalog()
    machines = catalog.machines.values()
    rows = [*catalog.chips.values(), *machines, *(price for machine in machines for price in machine.prices)]
    assert len(catalog.chips) >= 8 and len(catalog.machines) >= 10 and len(rows) > 30
    for row in rows:
        assert row.source and re.match(r"20\d\d(-\d\d)?(-\d\d)?", row.date), row
    assert {chip.kind for chip in catalog.chips.values()} == set(KINDS)


def test_the_numbers_that_plans_hang_on_are_those_of_the_sources():
    catalog = load_catalog()
    v5p, v6e = find_machine(catalog, "v5p-8"), find_machine(catalog, "v6e-8")
    assert (v5p.chips, v5p.devices, v6e.chips, find_machine(catalog, "tpu7x-4").devices) == (4, 4, 8, 8)
    assert v5p.chip.hbm_bytes == pytest.approx(95.74 * GIB, rel=1e-4)
    assert v5p.chip.flops_per_s == 459e12 and v6e.chip.flops_per_s == 918e12
    assert v5p.prices[0].usd_per_hour == 16.80
    prices = {price.region: price.usd_per_hour for price in v6e.prices}
    assert prices["asia-northeast1"] == 25.92 and prices["us-central1"] == 21.60


def test_rows_that_nobody_checked_say_so():
    catalog = load_catalog()
    assert not catalog.chips["v5e"].checked and not catalog.chips["rtx-pro-6000"].checked
    assert not any(price.checked for price in catalog.machines["8xb200"].prices)
    assert all(price.checked for price in catalog.machines["v5p-8"].prices)


def test_cpu_is_this_machine():
    cpu = find_machine(load_catalog(), "cpu")
    assert cpu.chip.hbm_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cpu.chip.flops_per_s == pytest.approx(256e9 * os.cpu_count())
    assert not cpu.chip.checked and "assumed" in cpu.chip.efficiency_source
    assert cpu.prices[0].usd_per_hour == 0


def test_own_prices_replace_the_shipped_ones_and_leave_the_chip(own):
    file = own(
        "machines: {v5p-8: {prices: [{provider: gcp, region: us-east5, usd_per_hour: 9, source: contract, date: "
        "'2026-11-01'}]}}"
    )
    machine = find_machine(load_catalog(file), "v5p-8")
    assert [price.usd_per_hour for price in machine.prices] == [9.0]
    assert machine.chip == load_catalog().chips["v5p"]


def test_own_chips_and_machines_are_added(own):
    file = own(
        "chips: {x1: {kind: gpu, hbm_bytes: 64000000000, flops_per_s: 1e15, hbm_bytes_per_s: 2e12, efficiency_low: "
        "0.2, "
        "efficiency_high: 0.5, efficiency_source: guess, source: me, date: '2026-11-01'}}\n"
        "machines: {4xx1: {chip: x1, chips: 4, interconnect_bytes_per_s: 1e11, source: me, date: '2026-11-01'}}"
    )
    catalog = load_catalog(file)
    assert find_machine(catalog, "4xx1").chip.flops_per_s == 1e15
    assert find_machine(catalog, "v5p-8") == find_machine(load_catalog(), "v5p-8")


@each(
    ("text", "message"),
    [
        ("chip: {}", "unknown key chip (did you mean chips?); allowed: chips, machines"),
        ("[1]", "must be a mapping of chips and machines"),
        ("machines: [1]", "machines must map names to rows"),
        ("machines: {v5p-8: {chips: 8}}", "machines.v5p-8: must say source and date, since it gives chips"),
        ("machines: {v5p-8: {chip: v5, source: me, date: d}}", "chip: 'v5' is not in the catalog"),
        (
            "machines: {v5p-8: {chips: four, source: me, date: d}}",
            "machines.v5p-8.chips: 'four' was given; must be a whole number",
        ),
        (
            "machines: {v5p-8: {chips: 0, source: me, date: d}}",
            "machines.v5p-8.chips: 0 was given; must be a whole number above zero",
        ),
        (
            "machines: {v5p-8: {chips: .inf, source: me, date: d}}",
            "machines.v5p-8.chips: inf was given; must be a whole number above zero",
        ),
        (
            "machines: {v5p-8: {chips: true, source: me, date: d}}",
            "machines.v5p-8.chips: True was given; must be a whole number",
        ),
        ("machines: {v5p-8: {host: 4, source: me, date: d}}", "unknown key host (did you mean hosts?)"),
        ("machines: {new: {chip: v5p, source: me, date: d}}", "machines.new.chips is missing"),
        ("machines: {v5p-8: {slices: 2, source: me, date: d}}", "machines.v5p-8: unknown key slices"),
        (
            "machines: {new: {chip: v5p, chips: 2, source: me, date: d}}",
            "interconnect_bytes_per_s is missing; a machine of 2 devices",
        ),
        ("machines: {v5p-8: {prices: 3}}", "machines.v5p-8.prices: must be a list"),
        ("machines: {v5p-8: {prices: [{provider: gcp, region: r}]}}", "machines.v5p-8.prices[0].source is missing"),
        (
            "machines: {v5p-8: {prices: [{provider: gcp, region: r, usd_per_hour: cheap, source: s, date: d}]}}",
            "prices[0].usd_per_hour: 'cheap' was given; must be a number, not below zero, or null",
        ),
        (
            "machines: {v5p-8: {prices: [{provider: gcp, region: r, usd_per_hour: -1, source: s, date: d}]}}",
            "prices[0].usd_per_hour: -1 was given; must be a number, not below zero",
        ),
        (
            "machines: {v5p-8: {prices: [{provider: gcp, region: r, usd_per_hour: .nan, source: s, date: d}]}}",
            "prices[0].usd_per_hour: nan was given; must be a number, not below zero",
        ),
        (
            "machines: {v5p-8: {prices: [{provider: gcp, region: r, usd_per_hour: 1, source: '', date: d}]}}",
            "prices[0].source: '' was given; must say something",
        ),
        ("machines: {v5p-8: {also: x, source: me, date: d}}", "also: 'x' was given; must be a list of names"),
        ("chips: {v5p: {kind: fpga, source: me, date: d}}", "chips.v5p.kind: 'fpga' was given; allowed: tpu, gpu, cpu"),
        (
            "chips: {v5p: {efficiency_low: 0.9, source: me, date: d}}",
            "efficiency_low and efficiency_high must be in order",
        ),
        (
            "chips: {v5p: {date: 2026-11-01, source: me}}",
            "chips.v5p.date: datetime.date(2026, 11, 1) was given; must be text; quote it",
        ),
        ("chips: {v5p: {", "is not YAML"),
        (
            "machines: {v5p-8: {measured_low: 0.3}}",
            "machines.v5p-8.measured_high is missing; it goes with measured_low",
        ),
        (
            "machines: {v5p-8: {measured_low: 0.5, measured_high: 0.4, measured_source: a run, measured_date: d}}",
            "machines.v5p-8: measured_low and measured_high must be in order",
        ),
        (
            "machines: {v5p-8: {served_decode_low: 0.3}}",
            "machines.v5p-8.served_decode_high is missing; it goes with served_decode_low",
        ),
        (
            "machines: {v5p-8: {served_decode_low: 0.3, served_decode_high: 1.2, served_prefill_low: 0.1, "
            "served_prefill_high: 0.2, served_source: a load test, served_date: d}}",
            "machines.v5p-8: served_decode_low and served_decode_high must be in order, above 0 and at most 1",
        ),
    ],
)
def test_a_bad_catalog_is_one_line_that_names_the_place(own, text, message):
    file = own(text)
    with pytest.raises(RecipeError) as error:
        load_catalog(file)
    assert message in str(error.value)
    assert str(error.value).startswith(f"hardware.catalog {file}") and "\n" not in str(error.value)


def test_a_missing_or_binary_catalog_is_said(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read"):
        load_catalog(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="is not UTF-8"):
        load_catalog(tmp_path / "bytes.yaml")


def test_the_users_own_rows_are_under_those_that_a_recipe_names(own, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    mine = own_catalog()
    assert mine == tmp_path / "config" / "gemsmith" / "machines.yaml" and own_files(None) == []
    mine.parent.mkdir(parents=True)
    row = "machines: {v5p-8: {prices: [{provider: me, region: r, usd_per_hour: %s, source: s, date: d}]}}"
    mine.write_text(row % 1)
    assert load_catalog().machines["v5p-8"].prices[0].usd_per_hour == 1
    assert load_catalog(own(row % 2)).machines["v5p-8"].prices[0].usd_per_hour == 2
