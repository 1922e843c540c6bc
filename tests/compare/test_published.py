import pytest

from gemsmith.compare.published import read_published, redraw


@pytest.fixture(scope="module")
def redrawn():
    return redraw(read_published())


def verdict(redrawn, claim):
    return next(each for each in redrawn.verdicts if each.claim.startswith(claim))


def test_its_own_ratios_come_out_of_its_tables(redrawn):
    ratios = {ratio.what: ratio.value for ratio in redrawn.comparison.pairs[0].ratios if ratio.kind == "cost"}
    assert ratios["training, on demand"] == pytest.approx(2.125, abs=0.001)
    assert ratios["training and 1 h of serving, on demand"] == pytest.approx(1.82, abs=0.002)
    assert ratios["training and 8 h of serving, on demand"] == pytest.approx(1.30, abs=0.003)
    assert ratios["training and 24 h of serving, on demand"] == pytest.approx(1.135, abs=0.001)


def test_the_figure_called_a_day_of_serving_is_one_hour_of_it(redrawn):
    found = verdict(redrawn, "training and 24 h of serving, a day of serving")
    assert not found.holds and found.found == "1.135 × by its own prices; 1.82 × is that of 1.0 h"
    assert verdict(redrawn, "training and 24 h of serving: 1.135").holds


def test_what_it_calls_identical_differs_in_adapters_steps_and_mask(redrawn):
    found = verdict(redrawn, "the same hyperparameters")
    assert not found.holds
    assert {"train:adapted", "train:steps", "data:loss_mask", "data.max_length"} <= set(
        found.found.partition(": ")[2].split(", ")
    )


def test_kv_dtypes_and_versions_that_differ_confound_serving(redrawn):
    serving = [ratio for ratio in redrawn.comparison.pairs[0].ratios if ratio.kind == "serving speed"]
    assert len(serving) > 10
    for ratio in serving:
        assert {"bench:kv_cache_dtype", "bench:vllm", "bench:prefix_caching"} <= set(ratio.confounded_by)


def test_no_ratio_of_it_is_a_headline(redrawn):
    assert redrawn.comparison.pairs[0].headlines() == []


def test_padding_rows_and_requests_are_found_by_the_checks_of_every_run(redrawn):
    text = " ".join(redrawn.comparison.notices)
    assert "TPU: padding took 70% of the positions" in text
    assert "GPU: 1,250 steps of 8 rows are 10,000 rows" in text and "TPU: 6 of its 6 loads have too few" in text


def test_scores_are_not_told_apart(redrawn):
    for ratio in redrawn.comparison.pairs[0].ratios:
        if ratio.kind == "quality":
            assert ratio.interval[0] < 0 < ratio.interval[1]


def test_at_the_price_of_its_zone_it_costs_more_within_a_day(redrawn):
    assert not verdict(redrawn, "v6e-8 for 21.52").holds
    assert [(curve.way, curve.break_even_hours) for curve in redrawn.at_catalogue] == [
        ("on demand", pytest.approx(15.72, abs=0.01)),
        ("spot", pytest.approx(6.24, abs=0.01)),
    ]


def test_output_is_not_within_three_percent_at_every_load(redrawn):
    found = verdict(redrawn, "output tokens/s")
    assert not found.holds and found.found.startswith("4 of 6 loads")


def test_claims_that_hold_are_said_to_hold(redrawn):
    assert sum(each.holds for each in redrawn.verdicts) == 6
    assert [each.holds for each in redrawn.verdicts] == sorted(each.holds for each in redrawn.verdicts)
