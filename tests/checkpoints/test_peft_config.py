import json

import pytest

from gemsmith.checkpoints.peft_config import CONFIG, PeftConfig, read_peft_config
from gemsmith.errors import CheckpointError
from gemsmith.system import patterns
from support.cases import each

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
MODULE = "model.layers.{}.self_attn.q_proj"


@pytest.fixture
def read(tmp_path):
    """Returns the config read from a file of these values: `read({"r": 4})`."""

    def make(change: dict) -> PeftConfig:
        (tmp_path / CONFIG).write_text(json.dumps(PLAIN | change))
        return read_peft_config(tmp_path)

    return make


def test_scale_is_alpha_over_the_rank_or_over_its_root(read):
    assert read({}).scale == 2.0
    assert read({"use_rslora": True}).scale == pytest.approx(16 / 8**0.5)


def test_patterns_match_the_end_of_a_modules_name(read):
    config = read({"rank_pattern": {r"layers\.1\..*q_proj": 4}, "alpha_pattern": {"q_pro": 2, "q_proj": 4}})
    assert [config.rank_of(MODULE.format(layer)) for layer in (0, 1, 11)] == [8, 4, 8]
    assert [config.scale_of(MODULE.format(layer)) for layer in (0, 1)] == [0.5, 1.0]
    assert config.scale_of("model.layers.0.mlp.up_proj") == 2.0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"target_modules": "all-linear"}, None),
        ({"target_modules": ["q_proj"]}, True),
        ({"target_modules": ["proj"]}, False),
        ({"target_modules": r".*\.q_proj"}, True),
        ({"target_modules": "q_proj"}, False),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*layers\.3\..*"}, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 2]}, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": 3}, True),
    ],
)
def test_which_modules_get_an_adapter_is_told_as_peft_reads_it(read, change, expected):
    assert read(change).targets(MODULE.format(3)) is expected


@each(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, r"must be a LoRA adapter's \(peft_type LORA\)"),
        ({"use_dora": True}, "has use_dora = true; only plain LoRA is known here"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"init_lora_weights": "pissa"}, 'has init_lora_weights = "pissa", which changed the base'),
        ({"r": 0}, "has r = 0; it must be a whole number above 0"),
        ({"r": None, "rank": 8}, "has r = null; it must be a whole number above 0"),
        ({"r": True}, "has r = true; it must be a whole number above 0"),
        ({"r": 8.5}, "has r = 8.5"),
        ({"lora_alpha": None}, "has lora_alpha = null; it must be a number above 0"),
        (
            {"rank_pattern": {"q": 0}},
            "has rank_pattern = .*; it must be a map of at most 1,000 modules' names to numbers above 0",
        ),
        ({"alpha_pattern": ["q"]}, "has alpha_pattern"),
        (
            {"rank_pattern": dict.fromkeys(map(str, range(1001)), 1)},
            "has rank_pattern = .*; it must be a map of at most 1,000 modules' names",
        ),
        ({"lora_alpha": 10**400}, "has a number of 401 digits"),
        ({"lora_dropout": "x"}, 'has lora_dropout = "x"; it must be a number from 0 to below 1'),
        ({"lora_dropout": 1}, "has lora_dropout = 1"),
        ({"use_rslora": "false"}, 'has use_rslora = "false"; it must be true or false'),
        ({"target_modules": 5}, "has target_modules = 5; it must be a list of modules' names, or one regular"),
        ({"target_modules": ["q_proj", 5]}, "has target_modules"),
        ({"exclude_modules": 5}, "has exclude_modules = 5"),
        ({"modules_to_save": ["lm_head"] * 9999}, "has modules_to_save = .{200}; only plain"),
        ({"init_lora_weights": "x" * 9999}, "has init_lora_weights = .{200}, which"),
        ({"layers_to_transform": "3"}, 'has layers_to_transform = "3"; it must be a layer or a list of them'),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_its_key(read, change, message):
    with pytest.raises(CheckpointError, match=message) as refused:
        read(change)
    assert "\n" not in str(refused.value)


def test_a_folder_without_the_file_or_with_half_of_it_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json; give a folder"):
        read_peft_config(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(PLAIN)[:-3])
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_peft_config(tmp_path)


@pytest.mark.parametrize("pattern", [r"(?:a|aa|a?a)+\d(?:a|aa)+b", "(", "(?:(?:a{1000}){1000}){1000}"])
def test_a_pattern_that_takes_for_ever_or_is_none_is_one_line(read, monkeypatch, pattern):
    monkeypatch.setattr(patterns, "TIMEOUT_S", 0.05)
    module, line = f"{'a' * 60}1{'a' * 60}c", "^adapter_config.json: .* is no regular expression that can be used"
    for ask in (
        lambda: read({"rank_pattern": {pattern: 4}}).rank_of(module),
        lambda: read({"alpha_pattern": {pattern: 4}}).scale_of(module),
        lambda: read({"target_modules": pattern}).targets(module),
    ):
        with pytest.raises(CheckpointError, match=line):
            ask()


@pytest.mark.parametrize("text", ["[" * 200_000, '{"r": 8, "r": 16}'])
def test_a_config_nested_without_end_or_with_a_key_twice_is_one_line(tmp_path, text):
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_peft_config(tmp_path)
