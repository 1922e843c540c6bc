import pytest

from gemsmith.analysis.confounders import KINDS, RULES, follows_from, rule_of
from gemsmith.recipe.load import default_values


def test_every_key_of_the_recipe_has_a_rule():
    keys = [*default_values(), "checkpoint", "data.train", "data.train.rows", "data.eval.split", "train.mesh.fsdp"]
    assert len(keys) > 80
    assert [key for key in keys if rule_of(key).pattern == "*"] == []


def test_what_has_no_rule_confounds_everything():
    assert rule_of("quantum.flux").confounds == KINDS


def test_no_rule_hides_another():
    for number, rule in enumerate(RULES):
        assert rule_of(rule.pattern.replace("*", "x")).pattern in {rule.pattern, *(r.pattern for r in RULES[:number])}
        example = rule.pattern.replace("*", "zz")
        assert rule_of(example) is rule, f"{rule.pattern} is never reached"


@pytest.mark.parametrize(
    ("condition", "confounds", "spares"),
    [
        ("optimizer.learning_rate", {"quality"}, {"training speed", "serving speed", "cost"}),
        ("train.remat", {"training speed", "cost"}, {"quality", "serving speed"}),
        ("train.epochs", {"quality", "cost"}, {"training speed", "serving speed"}),
        ("bench:kv_cache_dtype", {"serving speed", "cost"}, {"training speed", "quality"}),
        ("eval:kv_cache_dtype", {"quality"}, {"training speed", "serving speed", "cost"}),
        ("bench:vllm", {"serving speed", "cost"}, {"training speed", "quality"}),
        ("data:loss_mask_sha256", {"quality"}, {"training speed", "serving speed", "cost"}),
        ("price:training_on_demand", {"cost"}, {"training speed", "serving speed", "quality"}),
        ("serve.port", set(), set(KINDS)),
    ],
)
def test_a_difference_confounds_what_it_bears_on_and_spares_the_rest(condition, confounds, spares):
    assert set(rule_of(condition).confounds) == confounds
    assert not spares & set(rule_of(condition).confounds)


def test_a_consequence_of_what_is_compared_is_no_confound_of_it():
    assert follows_from("data:rows_sha256", ("data.max_length",)) == "data.max_length"
    assert follows_from("train:mesh", ("lora.rank", "train:machine")) == "train:machine"
    assert follows_from("lora.rank", ("lora.rank",)) == "lora.rank"
    assert follows_from("bench:vllm", ("lora.rank", "data.max_length")) is None


def test_what_must_be_recorded_are_names_and_no_patterns():
    needed = [rule.pattern for rule in RULES if rule.needed]
    assert "bench:prefix_caching" in needed and not [name for name in needed if "*" in name]
