from dataclasses import replace

import pytest

from gemsmith.errors import RecipeError
from gemsmith.hardware import find_machine, load_catalog
from gemsmith.hardware.catalog import machines_with, match_machine
from support.cases import each

MEANT = {
    "v5p-8": "v5p-8",
    "V5P-8": "v5p-8",
    "tpu-v5p-8": "v5p-8",
    "tpuv6e-8": "v6e-8",
    " v6e_4 ": "v6e-4",
    "v5litepod-4": "v5e-4",
    "ct6e-standard-8t": "v6e-8",
    "tpu7x": "tpu7x-4",
    "trillium": "v6e-1",
    "h200": "1xh200",
    "H100": "1xh100",
    "h100-80gb": "1xh100",
    "8h100": "8xh100",
    "8×H100": "8xh100",
    "8 x h100": "8xh100",
    "H100:8": "8xh100",
    "h100x4": "4xh100",
    "nvidia-l4": "1xl4",
    "l4": "1xl4",
    "a100-80": "1xa100-80",
    "A100-80GB:1": "1xa100-80",
    "a3-highgpu-2g": "2xh100",
    "p5en.48xlarge": "8xh200",
    "rtx-pro-6000": "g4-standard-48",
    "NVIDIA RTX PRO 6000": "g4-standard-48",
    "1xrtx-pro-6000": "g4-standard-48",
    "2xv6e-16": "2xv6e-16",
    "2 × v5p-8": "2xv5p-8",
    "4xtpu-v6e-16": "4xv6e-16",
    "2xct6e-standard-8t": "2xv6e-8",
    "1xv6e-16": "v6e-16",
}
UNKNOWN = (
    "a100",
    "3xh100",
    "v5p:4",
    "v5p-4",
    "8",
    "",
    "x",
    "tpu7x-16",
    "h100x0",
    "8xh100x2",
    "0xv6e-16",
    "2xv6e",
    "2xv6e-17",
)


@each(("name", "machine"), MEANT.items())
def test_a_near_form_means_a_machine(name, machine):
    assert find_machine(load_catalog(), name).name == machine


@each("name", UNKNOWN)
def test_what_means_no_machine_is_not_guessed(name):
    """a100 may be one of 40 or of 80 GB; and some names of TPUs count cores, others chips."""
    assert match_machine(load_catalog(), name) is None


def test_every_machine_is_found_by_its_own_and_its_other_names():
    catalog = load_catalog()
    others = [name for machine in catalog.machines.values() for name in (machine.name, *machine.also)]
    assert len(others) > 40 and len(set(others)) == len(others)
    for machine in catalog.machines.values():
        assert all(find_machine(catalog, name) is machine for name in (machine.name, *machine.also)), machine.name


def test_several_slices_have_the_chips_the_hosts_and_the_prices_of_all():
    one, two = (find_machine(load_catalog(), name) for name in ("v6e-16", "2xv6e-16"))
    assert (two.slices, two.chips, two.hosts, two.devices) == (2, 2 * one.chips, 2 * one.hosts, 2 * one.devices)
    assert two.interconnect_bytes_per_s == one.interconnect_bytes_per_s and two.topology == ""
    assert two.prices[0].usd_per_hour == 2 * one.prices[0].usd_per_hour == 86.40
    assert two.prices[0].usd_per_hour_spot == 2 * one.prices[0].usd_per_hour_spot
    assert two.prices[0].source.endswith("times 2 slices")
    measured = replace(one, measured_low=0.4, measured_high=0.5, measured_source="mine", measured_date="2026")
    assert measured.times(2) == two, "nothing was measured on both"


def test_only_tpus_have_several_slices():
    with pytest.raises(RecipeError, match=r"^--machine: '2x8xh100' was given; only TPUs have several slices, name one"):
        find_machine(load_catalog(), "2x8xh100", "--machine")
    with pytest.raises(RecipeError, match=r"^--machine: '5000xv5e-4' has 20,000 devices; allowed are 16,384$"):
        find_machine(load_catalog(), "5000xv5e-4", "--machine")


def test_slices_need_the_speed_of_what_joins_them(tmp_path):
    own = tmp_path / "own.yaml"
    row = "kind: tpu, hbm_bytes: 8, flops_per_s: 1, hbm_bytes_per_s: 1, efficiency_low: 1, efficiency_high: 1"
    dated = "source: me, date: '2026'"
    own.write_text(
        f"chips: {{t1: {{{row}, efficiency_source: me, {dated}}}}}\nmachines: {{t1-1: {{chip: t1, chips: 1, {dated}}}}}"
    )
    with pytest.raises(RecipeError, match=r"chips\.t1\.dcn_bytes_per_s is missing; '2xt1-1' needs it"):
        find_machine(load_catalog(own), "2xt1-1")


def test_an_unknown_machine_names_the_key_and_near_ones_in_one_line():
    with pytest.raises(
        RecipeError, match=r"^--machine: 'v5p-9' .*\(did you mean v5p-8 or .*\); allowed: .*v6e-8"
    ) as error:
        find_machine(load_catalog(), "v5p-9", "--machine")
    assert "\n" not in str(error.value)


def test_a_machine_is_known_by_what_drivers_call_its_devices():
    catalog = load_catalog()
    names = lambda *devices: [machine.name for machine in machines_with(catalog, devices)]  # noqa: E731
    assert names("NVIDIA H200") == ["1xh200"] and names(*["TPU v5"] * 4) == ["v5p-8"]
    assert names(*["TPU7x"] * 8) == ["tpu7x-4"], "a chip is two devices"
    assert names() == ["cpu"] and names("NVIDIA H100 PCIe") == []
