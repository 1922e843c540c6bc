"""Dollars: which machine of the plan trained, what its hour costs, what that makes of the measured time."""

import math

import pytest

from gemsmith.analysis.cost import actual_cost
from gemsmith.analysis.summary import read_findings, read_side
from gemsmith.report.runs import read_listed
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.plan_records import PlanPrice, PlanRecord
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import read_record, write_record


def trained_on(run, machine, *, planned=("v5p-8", "v6e-8", "2xh100"), **changes):
    """The run, whose record of training names this machine, and whose plan has a price of each of those planned."""
    train, plan = read_record(run, TrainRecord), read_record(run, PlanRecord)
    write_record(run, train.model_copy(update={"machine": machine, **changes}))
    prices = {"v5p-8": 16.8, "v6e-8": 21.6, "2xh100": 20.0}
    machines = tuple(
        row.model_copy(update={"price": PlanPrice(usd_per_hour=prices[row.name], basis="seller region", date="2026")})
        for row in plan.machines
        if row.name in planned
    )
    write_record(run, plan.model_copy(update={"machines": machines}))
    return run


@pytest.fixture
def rented(make_run):
    """A run that trained on the plan's v5p-8, at 16.80 dollars an hour."""
    return trained_on(make_run(steps=40), "v5p-8")


def test_time_becomes_dollars_at_the_price_of_the_plan(rented):
    found = actual_cost(read_findings(rented))
    train = read_record(rented, TrainRecord)
    assert found.price.machine == "v5p-8" and found.price.usd_per_hour == pytest.approx(16.8)
    assert found.training == pytest.approx(16.8 * 236.4 / 3600)
    tokens = sum(step.real_tokens for step in train.steps)
    assert found.per_million_trained_tokens == pytest.approx(found.training / tokens * 1e6)
    assert set(found.stages) == {"plan", "data", "train", "export", "verify", "serve", "bench", "eval"}
    assert found.served is None  # the load test's record does not say where its server was


def test_a_server_on_the_same_machine_has_a_price_a_token_and_a_request(rented):
    bench = read_record(rented, BenchRecord)
    write_record(rented, bench.model_copy(update={"endpoint": {"url": "http://127.0.0.1:8000"}}))
    found = actual_cost(read_findings(rented))
    cell = max(bench.cells, key=lambda cell: cell.output_tokens_per_s)
    assert found.served == cell
    expected = 16.8 / (3600 * cell.output_tokens_per_s) * 1e6
    assert found.price.usd_of(1e6, cell.output_tokens_per_s) == pytest.approx(expected)
    assert found.price.usd_of(1e3, cell.requests_per_s) == pytest.approx(16.8 / (3600 * cell.requests_per_s) * 1e3)
    assert found.price.usd_of(1e3, math.nan) is None
    write_record(rented, bench.model_copy(update={"endpoint": {"url": "http://10.0.0.1:8000"}}))
    assert actual_cost(read_findings(rented)).served is None


@pytest.mark.parametrize(
    ("machine", "planned", "usd_per_hour"),
    [
        ("2xh100", ("v5p-8", "v6e-8", "2xh100"), 20.0),
        ("2xh100", ("v5p-8",), None),
        ("v5p-8", ("v5p-8",), 16.8),
        (None, ("v5p-8",), None),
    ],
)
def test_report_runs_and_compare_charge_the_machine_that_trained_for_the_same_seconds(
    make_run, machine, planned, usd_per_hour
):
    """Of a plan of one v5p-8, two H100s were charged its price; of several machines the runs' table knew no cost."""
    run = trained_on(make_run(steps=40), machine, planned=planned, resumed_at=(20,), compile_s=30.0)
    found, listed, side = actual_cost(read_findings(run)), read_listed(run.path), read_side(run.path, "run")
    if usd_per_hour is None:
        assert (found, listed.cost, side.train_rates) == (None, None, {})
        return
    hours = (236.4 + sum(step.step_s for step in read_record(run, TrainRecord).steps[:20])) / 3600
    assert (found.price.basis, found.price.date) == ("seller region", "2026")
    dollars = [found.training, listed.cost, side.train_usd("on demand")]
    assert dollars == pytest.approx([usd_per_hour * hours] * 3, rel=1e-12)


def test_a_machine_that_the_plan_does_not_tell_costs_nobody_knows_what(make_run):
    assert actual_cost(read_findings(make_run(steps=3))) is None
