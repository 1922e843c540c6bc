"""The keys and defaults that the ported projects' installed releases have are those that the rules know."""

import dataclasses
import warnings
from typing import Any

import pytest

from gemsmith.importers.convert import find_rule
from gemsmith.importers.projects import PEFT, TRAINER, TRL
from gemsmith.importers.table import read_defaults, unknown


def fields_of(kind: Any) -> dict[str, Any]:
    return {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in dataclasses.fields(kind)
        if field.name != "output_dir"
    }


@pytest.fixture(scope="module")
def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("trl")
        assert module.SFTConfig and module.ModelConfig and module.ScriptArguments
    return module


def test_every_key_of_pefts_lora_config_has_a_rule():
    config = fields_of(pytest.importorskip("peft").LoraConfig)
    assert len(config) > 30
    assert [key for key in config if find_rule(key, PEFT.rules) is unknown] == []
    assert {key: config[key] for key in PEFT.defaults} == PEFT.defaults


def test_every_key_of_trls_configs_has_a_rule(trl):
    keys = {*fields_of(trl.SFTConfig), *fields_of(trl.ModelConfig), *fields_of(trl.ScriptArguments)} - {
        "model_init_kwargs",
        "dataset_kwargs",
    }
    assert len(keys) > 120
    assert [key for key in sorted(keys) if find_rule(key, TRL.rules) is unknown] == []


def test_defaults_are_those_of_trl_and_transformers(trl):
    transformers = pytest.importorskip("transformers")
    model, arguments, sft = (
        fields_of(kind) for kind in (trl.ModelConfig, transformers.TrainingArguments, trl.SFTConfig)
    )
    # None there, and made true unless fp16 is asked for.
    assert sft.pop("bf16") is None
    defaults = dict(TRL.defaults)
    assert defaults.pop("bf16") is True
    assert {key: sft[key] for key in defaults} == defaults
    assert {key: arguments[key] for key in TRAINER.defaults} == TRAINER.defaults
    lora = read_defaults("trl_model") | read_defaults("trl_lora")
    assert {key: model[key] for key in lora} == lora
