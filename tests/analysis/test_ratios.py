import pytest

from gemsmith.analysis.ratios import (
    asked_notes,
    common_cells,
    find_ratios,
    latency_interval,
    own_interval,
    refused_scores,
    score_interval,
    throughput_interval,
)
from gemsmith.analysis.sides import SideScore
from gemsmith.evals.metrics import bootstrap_interval


def score(value, *, task="t", name="t, tuned", **values):
    return SideScore(task=task, name=name, value=value, **{"questions": 100, **values})


def test_ratios_are_of_the_recorded_numbers(demo_side, demo_records):
    ratios = find_ratios(demo_side("a"), demo_side("b", train={"real_tokens_per_s": 2368.0}), hours=(1,))
    speed = next(ratio for ratio in ratios if ratio.kind == "training speed")
    assert (speed.first, speed.other) == (demo_records["train"].real_tokens_per_s, 2368.0)
    assert speed.value == 2368.0 / demo_records["train"].real_tokens_per_s


def test_a_run_whose_speed_drifted_is_no_headline(plain_side):
    steady = plain_side("a", real_tokens_per_s=100.0, timed_steps=((100.0, 1.0),) * 40)
    drifting = plain_side("b", real_tokens_per_s=75.0, timed_steps=((100.0, 1.0),) * 20 + ((100.0, 2.0),) * 20)
    (ratio,) = find_ratios(steady, drifting, hours=())
    assert ratio.notes == ("b was not steady: 100 real tokens/s in its first half, 50 in its second",)
    assert not ratio.is_headline and find_ratios(steady, steady, hours=())[0].is_headline


def test_only_like_loads_are_compared(plain_side, cell):
    first = plain_side("a", cells=(cell(10, request_rate=2.0), cell(20, request_rate=8.0)))
    other = plain_side("b", cells=(cell(30, request_rate=8.0), cell(40)))
    assert [(ours.output_tokens_per_s, theirs.output_tokens_per_s) for ours, theirs in common_cells(first, other)] == [
        (20, 30)
    ]


def test_a_throughput_that_was_only_asked_for_is_no_headline(plain_side, cell):
    light, heavy = {"request_rate": 2.0}, {"request_rate": 32.0}
    sides = [
        plain_side(name, cells=(cell(63, **light), cell(speed, **heavy))) for name, speed in (("a", 400), ("b", 200))
    ]
    ratios = find_ratios(*sides, hours=())
    assert [(ratio.value, ratio.main, bool(ratio.notes)) for ratio in ratios] == [
        (1.0, False, True),
        (0.5, True, False),
    ]
    only_light = [side.model_copy(update={"cells": side.cells[:1]}) for side in sides]
    (asked,) = find_ratios(*only_light, hours=())
    assert asked.main and not asked.is_headline
    assert asked_notes(cell(60, **light), cell(63, **light)) and not asked_notes(cell(50, **light), cell(63, **light))


def test_lost_requests_and_other_numbers_of_them_are_said(plain_side, cell):
    first = plain_side("a", cells=(cell(10, requests=24, real_input_tokens=64.5),))
    other = plain_side("b", cells=(cell(10, requests=48, unanswered=3, real_input_tokens=68.2),))
    (ratio,) = find_ratios(first, other, hours=())
    assert ratio.notes == (
        "b: 3 of 48 requests were not answered, and are in no number",
        "24 requests against 48",
        "prompts of 64 tokens against 68",
    )
    assert not ratio.is_headline


def test_serving_ratios_have_intervals_over_requests_and_pairs_where_the_prompts_are_the_same(plain_side, served):
    ours, theirs = served(1.0, prompts="ab"), served(1.3, prompts="ab", seed=1)
    ratios = find_ratios(plain_side("a", cells=(ours,)), plain_side("b", cells=(theirs,)), hours=())
    assert [ratio.unit for ratio in ratios] == ["output tokens/s", "ms TTFT", "ms TPOT"]
    assert [ratio.interval_of for ratio in ratios] == [
        "50 parts of the time resampled, one run each",
        "paired over 60 prompts, one run each",
        "paired over 60 prompts, one run each",
    ]
    for ratio in ratios:
        low, high = ratio.interval
        assert low < ratio.value < high
    (_, ttft_high), (tpot_low, _) = (ratio.interval for ratio in ratios[1:])
    assert tpot_low > 1.2 and ttft_high > 1.2


def test_pairs_narrow_the_interval_where_the_prompt_is_what_takes_time(served):
    ours, theirs = served(1.0, prompts="ab"), served(1.1, prompts="ab")  # the same noise: a slower machine
    paired, of = latency_interval("TTFT", ours, theirs)
    apart, of_apart = latency_interval("TTFT", ours, served(1.1, prompts="cd"))
    assert of.startswith("paired") and of_apart == "requests resampled, one run each"
    assert paired == pytest.approx((1.1, 1.1)) and apart[1] - apart[0] > 0.05


@pytest.mark.parametrize("change", [{"unanswered": 1}, {"each": None}])
def test_lost_requests_are_not_paired_and_records_without_single_ones_have_no_interval(change, served):
    ours, theirs = served(1.0, prompts="ab"), served(1.1, prompts="ab").model_copy(update=change)
    interval, of = latency_interval("TPOT", ours, theirs)
    if theirs.each is None:
        assert (interval, of) == (None, "no single requests recorded, 60 in all") == throughput_interval(ours, theirs)
    else:
        assert interval is not None and of == "requests resampled, one run each"


def test_tokens_that_come_all_at_once_have_no_interval(served):
    at_once = served(1.0)
    each = at_once.each.model_copy(
        update={"start_ms": (0.0,) * 60, "ttft_ms": (99.0,) * 60, "latency_ms": (100.0,) * 60}
    )
    lump = at_once.model_copy(update={"each": each})
    assert throughput_interval(at_once, lump) == (None, "its tokens came in too small a part of the time")


def test_questions_that_both_answered_are_paired(plain_side):
    questions = {f"q{n}": n % 2 for n in range(100)}
    better = questions | {f"q{n}": 1 for n in range(0, 20, 2)}
    interval, of = score_interval(
        score(0.5, low=0.4, high=0.6, by_question=questions), score(0.6, low=0.5, high=0.7, by_question=better)
    )
    assert of == "paired over 100 questions" and 0.03 < interval[0] < 0.1 < interval[1] < 0.18
    unpaired, of = score_interval(score(0.5, low=0.4, high=0.6), score(0.6, low=0.5, high=0.7))
    assert "not paired" in of and "at most" not in of and unpaired[0] < 0 < interval[0]


def test_without_pairs_the_interval_is_newcombes():
    # Newcombe 1998, table II, example a: 56/70 against 48/80; method 10 without continuity gives 0.0524 to 0.3339.
    first, other = (score(x / n, questions=n) for x, n in ((48, 80), (56, 70)))
    interval, of = score_interval(first, other)
    assert interval == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert "at most" in of


def test_a_score_without_an_interval_gets_the_widest_of_its_questions():
    low, high = own_interval(score(0.641, questions=156))
    assert (low, high) == pytest.approx((0.563, 0.712), abs=1e-3)
    assert own_interval(score(0.5, low=0.1, high=0.9)) == (0.1, 0.9)


def test_how_many_questions_were_all_right_or_all_wrong_narrows_the_interval():
    """It is no narrower than that of resampled scores which are so distributed, but for Wilson's own 1 %."""
    known = {"questions": 156, "samples": 5, "all_right": 89, "none_right": 50}
    narrow, wide = own_interval(score(100 / 156, **known)), own_interval(score(100 / 156, questions=156))
    assert wide[0] < narrow[0] and narrow[1] < wide[1]
    for between in ([0.8] * 12 + [0.6] + [0.2] * 4, [0.6] * 13 + [0.8] * 4, [0.8, 0.6] * 7 + [0.4] * 3):
        shares = [1.0] * 89 + [0.0] * 50 + between
        low, high = bootstrap_interval(shares)
        assert sum(shares) == pytest.approx(100, abs=0.01) and narrow[1] - narrow[0] >= 0.98 * (high - low)


def test_scores_of_other_tasks_are_refused_and_the_rest_is_compared(plain_side):
    first = plain_side("a", scores=(score(0.5), score(0.4, task="u", name="u, tuned")), real_tokens_per_s=2.0)
    other = plain_side("b", scores=(score(0.7), score(0.1, task="v", name="v, tuned")), real_tokens_per_s=4.0)
    assert [line.split(": ", 1)[1] for line in refused_scores(first, other)] == ["a: u.", "b: v."]
    ratios = find_ratios(first, other, hours=())
    assert [(ratio.kind, round(ratio.value, 9)) for ratio in ratios] == [("training speed", 2.0), ("quality", 0.2)]
    assert refused_scores(first, first) == [] and refused_scores(first, plain_side("c")) == []


def test_cost_is_of_both_ways_and_of_every_number_of_hours(plain_side, rented, cell):
    sides = [
        plain_side(name, train_hours=hours, train_rates=rented(8), serve_rates=rented(usd), cells=(cell(1000.0),))
        for name, hours, usd in (("a", 1.0, 36.0), ("b", 2.0, 18.0))
    ]
    found = {ratio.what: ratio.value for ratio in find_ratios(*sides, hours=(1, 24)) if ratio.kind == "cost"}
    assert found["training, on demand"] == found["training, spot"] == 2.0
    assert found["training and 24 h of serving, on demand"] == (16 + 24 * 18) / (8 + 24 * 36)
    assert found["a million output tokens, 64 in, 32 out, a burst, on demand"] == 0.5


def test_what_costs_nothing_has_no_ratio(plain_side, rented):
    sides = [plain_side(name, train_hours=1.0, train_rates=rented(usd)) for name, usd in (("a", 0.0), ("b", 2.0))]
    ratio = find_ratios(*sides, hours=())[0]
    assert ratio.value is None and ratio.notes and not ratio.is_headline
    assert find_ratios(sides[0], sides[0], hours=()) == []
