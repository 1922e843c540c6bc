import pytest

from gemsmith.errors import InputError
from gemsmith.hardware import load_catalog
from gemsmith.launch.provider import ChosenOptions
from gemsmith.launch.request import default_region, estimate_cost, find_price
from gemsmith.runs.plan_records import MachinePlan

MACHINES = load_catalog().machines
PLAN = MachinePlan(
    name="v5p-8",
    chips=4,
    fits=True,
    hbm_bytes_per_chip=1,
    hbm_limit_bytes_per_chip=2,
    step_s=(1, 2),
    hours=(1.0, 4.0),
    usd=(16.8, 67.2),
    mesh={},
)
OPTIONS = ChosenOptions(
    name="n",
    machine="v5p-8",
    bucket="gs://b",
    project="p",
    region="us-central1",
    stages=("train",),
    service_account="s",
)


def bill_of(steps=100, attempts=4, **changed):
    options = OPTIONS.model_copy(update=changed)
    return estimate_cost(MACHINES["v5p-8"], PLAN, options, steps=steps, attempts=attempts)


def test_the_greatest_bill_is_every_attempt_up_to_its_timeout():
    bill = bill_of()
    assert bill.timeout_s.value == 8 * 3600 and bill.usd == (16.8, 67.2)
    assert bill.max_usd == pytest.approx(8 * 4 * 16.80)
    assert bill_of(timeout_hours=0.5, attempts=1).max_usd == pytest.approx(0.5 * 16.80)


def test_spot_is_paid_at_spot_prices():
    assert bill_of(spot=True).usd_per_hour == 3.34
    assert default_region(MACHINES["v6e-8"], spot=True) == "asia-southeast1"


def test_without_a_number_of_steps_a_timeout_must_be_given():
    with pytest.raises(InputError, match=r"^--timeout-hours: is missing, .*train\.max_steps$"):
        bill_of(steps=None)
    assert bill_of(steps=None, timeout_hours=3).usd is None


def test_a_price_that_is_not_known_is_an_error_with_those_that_are():
    with pytest.raises(InputError, match=r"^--region asia-east1: .*us-central1 \(16\.80 USD/h\).*hardware\.catalog"):
        find_price(MACHINES["v5p-8"], "asia-east1", spot=False)
    with pytest.raises(InputError, match="has no spot price of it at Google"):
        find_price(MACHINES["cloud-run-20"], "us-central1", spot=True)


def test_the_price_of_an_area_is_that_of_its_regions_and_names_none_to_go_to():
    machine = MACHINES["g4-standard-48"]
    assert find_price(machine, "us-central1", spot=False).region == "us"
    assert default_region(machine, spot=False) is None
    with pytest.raises(InputError, match=r"^--region: is missing; .* price of g4-standard-48 is of us \(4\.50 USD/h\)"):
        find_price(machine, "", spot=False)
    with pytest.raises(InputError, match=r"^--region europe-west4: the catalog has no on-demand price"):
        find_price(machine, "europe-west4", spot=False)
