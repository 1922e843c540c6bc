from pathlib import Path

import pytest

from gemsmith.analysis.published import read_published, reanalyze
from gemsmith.analysis.sides import _text
from gemsmith.recipe.load import load_recipe, plain_values
from gemsmith.recipe.serving import GRIDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def redrawn():
    return reanalyze(read_published())


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
    assert verdict(redrawn, "training and 24 h of serving, on demand, USD: 572.59 and 650.11").holds


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
    assert not any(ratio.is_headline for ratio in redrawn.comparison.pairs[0].ratios)


def test_padding_rows_and_requests_are_found_by_the_checks_of_every_run(redrawn):
    text = " ".join(redrawn.comparison.warnings)
    assert "TPU: padding took 70% of the positions" in text
    assert "GPU: 1,250 steps of 8 rows are 10,000 rows" in text and "TPU: 15 of its 16 loads have too few" in text


def test_a_ttft_below_the_floor_of_the_chips_is_named(redrawn):
    found = [line for line in redrawn.comparison.warnings if "below the floor" in line]
    assert [line.partition(" that")[0] for line in found] == [
        "TPU: its TTFT of 62 ms (15,360 in, 512 out, 4 requests/s) is below the floor of 123 ms",
        "GPU: its TTFT of 99 ms (15,360 in, 512 out, 4 requests/s) is below the floor of 455 ms",
    ]


def test_problems_without_a_right_answer_leave_less_than_its_pass_at_5(redrawn):
    text = " ".join(redrawn.comparison.warnings)
    assert "pass@5, tuned of 0.795 is more than the 0.679 that 50 of 156" in text
    assert "pass@5, tuned of 0.814 is more than the 0.750 that 39 of 156" in text


def test_what_it_says_is_not_called_unsaid(redrawn):
    """Rates, engines, KV caches, clipping, recomputation and weights stood as not recorded, or as one of two."""
    tpu, gpu = redrawn.comparison.sides
    said = {each.condition: each.values for each in redrawn.comparison.differences}
    assert said["optimizer.max_grad_norm"] == ("null", "1.0")
    assert said["bench:vllm"] == ("vllm-tpu 0.19.0", "vllm 0.20.2")
    assert said["bench:kv_cache_dtype"] == ("fp8_e5m2", "bfloat16")
    alike = {"train.remat": "layer", "train:base_dtype": "bfloat16", "bench:dtype": "bfloat16", "data:seed": "42"}
    assert alike.items() <= tpu.conditions.items() and alike.items() <= gpu.conditions.items()
    assert not {"train.remat", "bench:dtype", "bench:quantization", "train:mesh"} & {
        name for name, values in said.items() if None in values
    }
    assert max(cell.input_tokens for cell in tpu.cells) == 15_360
    for cell in tpu.cells:
        assert cell.ttft_ms is None or cell.request_rate in (4, 10_000) or cell.asked is cell.request_rate is None
    figures = redrawn.figures
    assert figures["final training loss"] == ("0.072", "2.258")
    assert figures["P99 ITL, 128 in, 256 out, 10,000 requests/s"] == ("22.29 ms", "20.49 ms")
    assert "37 were too long, 4 empty" in figures["rows that were kept"][0]


def test_every_claim_names_the_version_that_makes_it(redrawn):
    of = {each.claim.partition(":")[0]: each.of for each in redrawn.verdicts}
    assert (
        of["output tokens/s across platforms within 3%"]
        == of["128 in, 256 out, 10,000 requests/s, ms TTFT"]
        == "v1 and v2"
    )
    assert of["4,096 in, 512 out, 4 requests/s, ms TTFT"] == "v3"
    assert {"v1 to v3", "v1 and v2", "v3", "its text"} == set(of.values())
    longer = ["66", "23.6", "7.1", "1.45"]
    assert [number for number in longer if any(number in v.claim and v.of == "v3" for v in redrawn.verdicts)] == longer


def test_values_of_the_paper_are_written_as_a_recipe_writes_them(redrawn):
    """64 and 64.0 would be a difference that is none."""
    ours = plain_values(load_recipe(ROOT / "recipes/verilog_31b.yaml"))
    keys = [f"lora.{key}" for key in ("rank", "alpha", "dropout")] + ["train.dtype", "train.epochs"]
    keys += [
        f"optimizer.{key}" for key in ("learning_rate", "schedule", "warmup_steps", "weight_decay", "max_grad_norm")
    ]
    assert {key: redrawn.comparison.sides[1].conditions[key] for key in keys} == {key: _text(ours[key]) for key in keys}


def test_runs_stand_beside_each_of_its_sides(demo_side, demo_records):
    loads = [load for load in GRIDS["paper"].loads if load.input_tokens == 15_360 and load.is_open]
    cells = tuple(
        demo_records["bench"]
        .cells[0]
        .model_copy(
            update={**vars(load), "output_tokens_per_s": 10.0 + load.request_rate, "real_input_tokens": 15_360.0}
        )
        for load in loads
    )
    mine = demo_side("mine", bench={"cells": cells})
    found = reanalyze(read_published(), [mine], hours=[3])
    pairs = {(pair.first, pair.other): pair for pair in found.comparison.pairs}
    tpu, gpu = "paper's TPU", "paper's GPU"
    assert list(pairs) == [(tpu, gpu), (tpu, "mine"), (gpu, "mine")]
    ratios = {(ratio.what, ratio.unit): ratio for ratio in pairs[gpu, "mine"].ratios}
    best = ratios["15,360 in, 512 out, the best of 1 to 64 requests/s", "output tokens/s"]
    assert (best.first, best.other) == (326, 74)
    assert ratios["15,360 in, 512 out, 4 requests/s", "ms TTFT"].first == 99
    assert {"model", "bench:vllm", "bench:machine"} <= set(best.confounded_by) | set(found.comparison.varying)
    assert not any(ratio.is_headline for ratio in pairs[tpu, "mine"].ratios)
    assert "verilog-exact" in " ".join(pairs[tpu, "mine"].refused)
    assert found.verdicts == reanalyze(read_published()).verdicts


def test_scores_are_not_told_apart(redrawn):
    for ratio in redrawn.comparison.pairs[0].ratios:
        if ratio.kind == "quality":
            assert ratio.interval[0] < 0 < ratio.interval[1]


def test_at_the_price_of_its_zone_it_costs_more_within_a_day(redrawn):
    assert not verdict(redrawn, "v6e-8 for 21.52").holds
    assert [(curve.way, curve.break_even_hours) for curve in redrawn.at_catalog] == [
        ("on demand", pytest.approx(15.72, abs=0.01)),
        ("spot", pytest.approx(6.24, abs=0.01)),
    ]


def test_output_is_not_within_three_percent_at_every_load(redrawn):
    found = verdict(redrawn, "output tokens/s")
    assert not found.holds and found.found.startswith("4 of 6 loads")


def test_claims_that_hold_are_said_to_hold(redrawn):
    assert sum(each.holds for each in redrawn.verdicts) == 17
    assert [each.holds for each in redrawn.verdicts] == sorted(each.holds for each in redrawn.verdicts)
