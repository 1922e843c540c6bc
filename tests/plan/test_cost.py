import pytest

from gemsmith.hardware import load_catalog
from gemsmith.hardware.model.step_time import StepTime
from gemsmith.plan.cost import COMPILE_S, PREEMPTION_HOURS, cheapest_spot, cost_of, on_demand, plan_price, startup_s
from gemsmith.recipe.schema import Train

TIME = StepTime(flops=1e15, low_s=1.0, high_s=2.0, ideal_s=0.7, hbm_s=0.1, interconnect_s=0.1)
MACHINES = load_catalog().machines


def cost(machine="v5p-8", *, steps=3600, tokens=1000.0, checkpoint_bytes=60e9, time=TIME, **train):
    return cost_of(
        time, MACHINES[machine], Train(**train), steps=steps, tokens=tokens, checkpoint_bytes=checkpoint_bytes
    )


def test_hours_are_one_start_and_the_steps():
    low, high = COMPILE_S["tunix"]
    assert cost().startup_s == {"load": (60, 300), "compile": (low, high)}
    assert cost().hours == pytest.approx((1 + (60 + low) / 3600, 2 + (300 + high) / 3600), rel=1e-3)


def test_evaluations_take_as_long_as_so_many_steps_more():
    found = cost_of(
        TIME, MACHINES["v5p-8"], Train(), steps=3600, tokens=1000.0, checkpoint_bytes=60e9, evaluated=(360, 720)
    )
    assert found.evaluations_s == (360, 1440) and cost().evaluations_s == (0, 0)
    assert found.hours == pytest.approx((cost().hours[0] + 0.1, cost().hours[1] + 0.4), rel=1e-3)


def test_compilation_is_the_backends_and_on_cpu_the_tiny_models():
    assert startup_s(MACHINES["1xh100"], "trl", 0)["compile"] == COMPILE_S["trl"]
    assert startup_s(MACHINES["cpu"], "tunix", 0)["compile"] == COMPILE_S["cpu"]


def test_a_million_tokens_cost_their_share_of_the_dollars():
    """3,600 steps of 1,000 real tokens are 3.6 million."""
    assert cost().usd_per_million_tokens == pytest.approx([usd / 3.6 for usd in cost().usd], rel=1e-3)
    assert cost(tokens=None).usd_per_million_tokens is None


def test_what_is_billed_by_the_minute_is_paid_to_its_end():
    price = MACHINES["cloud-run-20"].prices[0]
    ours = cost("cloud-run-20", steps=10, checkpoint_bytes=0)
    assert ours.hours[0] * 60 == pytest.approx(190 / 60, rel=1e-3) and ours.usd[0] == pytest.approx(
        price.usd_per_hour * 4 / 60, rel=1e-3
    )


def test_spot_pays_again_for_what_was_lost():
    """Half of 100 steps of 2 s, and a start of 780 s, of every 6 hours."""
    lost = (100 + 780) / 3600
    high = cost(save_steps=100).hours[1] * PREEMPTION_HOURS / (PREEMPTION_HOURS - lost)
    assert cost(save_steps=100).usd_spot == pytest.approx((3.34 * cost().hours[0], 3.34 * high), rel=1e-3)
    assert cost(save_steps=1000).usd_spot[1] > cost(save_steps=10).usd_spot[1]


def test_spot_that_would_never_get_on_has_no_dollars():
    assert cost(save_steps=100_000).usd_spot is None
    assert cost("1xh200").usd is None and cost("1xh200").usd_spot is None


def test_a_plans_price_is_the_catalogs_row():
    price, spot = on_demand(MACHINES["v6e-8"]), cheapest_spot(MACHINES["v6e-8"])
    kept, kept_spot = plan_price(price), plan_price(spot, spot=True)
    assert (kept.usd_per_hour, kept.date) == (price.usd_per_hour, price.date)
    assert kept.basis == f"{price.provider} {price.region}, {price.source}"
    assert kept_spot.usd_per_hour == spot.usd_per_hour_spot < kept.usd_per_hour and spot.region in kept_spot.basis
    unchecked = on_demand(MACHINES["v6e-1"])
    assert not unchecked.checked and plan_price(unchecked).basis.endswith(", not checked")
    assert plan_price(None) is None and plan_price(spot.__class__(**{**vars(spot), "usd_per_hour": None})) is None
