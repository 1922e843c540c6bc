"""Dollars: which machine of the plan trained, what its hour costs, what that makes of the measured time."""

import math

import pytest

from gemsmith.bench_records import BenchRecord
from gemsmith.plan_records import MachinePlan, PlanPrice, PlanRecord
from gemsmith.records import AgainstPlan, TrainRecord
from gemsmith.report.cost import _has_devices, spent
from gemsmith.report.findings import read_findings
from gemsmith.run import read_record, write_record


@pytest.mark.parametrize(
    ("name", "chips", "devices", "expected"),
    [
        ("v5p-8", 4, ["TPU v5"] * 4, True),
        ("v5p-8", 4, ["TPU v5p"] * 4, True),
        ("v5p-8", 4, ["TPU v5 lite"] * 4, False),
        ("v5e-4", 4, ["TPU v5 lite"] * 4, True),
        ("v6e-8", 8, ["TPU v6 lite"] * 8, True),
        ("v6e-8", 8, ["TPU v6e"] * 4, False),
        ("tpu7x-4", 4, ["TPU7x"] * 8, True),
        ("2xh100", 2, ["NVIDIA H100 80GB HBM3"] * 2, True),
        ("1xh100", 1, ["NVIDIA H200"], False),
        ("1xa100-80", 1, ["NVIDIA A100-SXM4-80GB"], True),
        ("cpu", 1, [], True),
        ("cpu", 1, ["NVIDIA L4"], False),
        ("1xl4", 1, [], False),
    ],
)
def test_a_machine_is_known_by_its_devices(name, chips, devices, expected):
    assert _has_devices(MachinePlan.model_construct(name=name, chips=chips), devices) is expected


@pytest.fixture
def rented(make_run):
    """A run that trained on the plan's v5p-8, at 16.80 dollars an hour."""
    run = make_run(steps=40)
    train = read_record(run, TrainRecord)
    machine = train.origin.machine.model_copy(update={"accelerators": ("TPU v5",) * 4})
    write_record(run, train.model_copy(update={"origin": train.origin.model_copy(update={"machine": machine})}))
    return run


def test_time_becomes_dollars_at_the_price_of_the_plan(rented):
    found = spent(read_findings(rented))
    train = read_record(rented, TrainRecord)
    assert found.price.machine == "v5p-8" and found.price.usd_per_hour == pytest.approx(16.8)
    assert found.training == pytest.approx(16.8 * 236.4 / 3600)
    seconds, tokens = sum(step.step_s for step in train.steps), sum(step.real_tokens for step in train.steps)
    assert found.per_million_trained_tokens == pytest.approx(16.8 * seconds / 3600 / tokens * 1e6)
    assert set(found.stages) == {"plan", "data", "train", "export", "verify", "serve", "bench", "eval"}
    assert found.served is None  # the load test's record does not say where its server was


def test_a_server_on_the_same_machine_has_a_price_a_token_and_a_request(rented):
    bench = read_record(rented, BenchRecord)
    write_record(rented, bench.model_copy(update={"endpoint": {"url": "http://127.0.0.1:8000"}}))
    found = spent(read_findings(rented))
    cell = max(bench.cells, key=lambda cell: cell.output_tokens_per_s)
    assert found.served == cell
    expected = 16.8 / (3600 * cell.output_tokens_per_s) * 1e6
    assert found.price.usd_per_million_output_tokens(cell) == pytest.approx(expected)
    assert found.price.usd_per_thousand_requests(cell) == pytest.approx(16.8 / (3600 * cell.requests_per_s) * 1e3)
    assert found.price.usd_per_thousand_requests(cell.model_copy(update={"requests_per_s": math.nan})) is None
    write_record(rented, bench.model_copy(update={"endpoint": {"url": "http://10.0.0.1:8000"}}))
    assert spent(read_findings(rented)).served is None


def test_what_the_plan_s_price_is_and_which_machine_trained_are_taken_from_the_records(make_run):
    run = make_run(steps=3)
    plan, train = read_record(run, PlanRecord), read_record(run, TrainRecord)
    price = PlanPrice(usd_per_hour=20.0, basis="seller region", date="2026-11-21")
    machines = tuple(machine.model_copy(update={"price": price}) for machine in plan.machines)
    write_record(run, plan.model_copy(update={"machines": machines}))
    against = AgainstPlan(machine="2xh100", planned_step_s=(1.0, 2.0), step_s=1.5, steps=2)
    write_record(run, train.model_copy(update={"against_plan": against}))
    found = spent(read_findings(run)).price
    assert (found.machine, found.usd_per_hour, found.basis) == ("2xh100", 20.0, "seller region, 2026-11-21")


def test_a_machine_that_the_plan_does_not_tell_costs_nobody_knows_what(make_run):
    assert spent(read_findings(make_run(steps=3))) is None
