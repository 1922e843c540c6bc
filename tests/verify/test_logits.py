"""The logits of the base with its adapter, and those of the merged weights."""

import json
import shutil

import numpy as np
import pytest

from gemsmith.errors import CheckpointError
from gemsmith.train.torch.upstream import quiet
from gemsmith.verify import logits
from gemsmith.verify.logits import _losses
from gemsmith.verify.prompts import Prompt
from gemsmith.verify.stage import verify


def test_a_model_too_large_for_memory_is_said_and_not_passed(exported, monkeypatch):
    monkeypatch.setattr(logits, "free_memory_bytes", lambda: 10**6)
    record = verify(exported)
    assert record.logits_max_abs_difference is None
    assert record.checks[-1].passed is None
    assert "needs 1.1 GB of memory, 0.0 GB are free" in record.checks[-1].detail


def test_an_adapter_without_effect_on_the_logits_proves_nothing():
    same = [np.ones((4, 8), np.float32)]
    assert logits._judge(same, same, same, same, what=("one", "other"), how="")[0].passed is False


def test_weights_that_transformers_would_fill_in_at_random_are_refused(exported):
    file = exported.merged / "config.json"
    config = json.loads(file.read_text())
    config["architectures"] = ["Gemma4UnifiedForCausalLM"]
    config |= {"model_type": "gemma4_unified_text"}
    file.write_text(json.dumps(config | config.pop("text_config")))
    with pytest.raises(CheckpointError, match="missing keys"), quiet():
        logits.load_model(exported.merged)


def test_a_checkpoint_of_a_later_transformers_is_said_with_what_to_install(tiny_checkpoint, tmp_path):
    folder = tmp_path / "later"
    shutil.copytree(tiny_checkpoint("tiny-31b"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "99.0"}))
    wanted = r"cannot load it \(no width\); 99.0 saved it: pip install --no-deps --upgrade transformers"
    with pytest.raises(CheckpointError, match=wanted), logits._load_errors(folder):
        raise TypeError("no width")


def test_the_mean_loss_is_taken_over_targets_alone():
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, 9, 6), np.array([1, 0, 1, 0, 0, 1])
    prompts = [Prompt(tokens=tokens), Prompt(tokens=tokens, targets=targets)]
    models = [[random.standard_normal((6, 9)).astype(np.float32) for _ in prompts] for _ in range(3)]
    found = _losses(prompts, *models)
    for model, loss in zip(models, (found.base, found.trained, found.exported), strict=True):
        share = np.exp(model[1]) / np.exp(model[1]).sum(1, keepdims=True)
        assert loss == pytest.approx(-np.log([share[1, tokens[2]], share[4, tokens[5]]]).mean())
    assert found.targets == 2 and _losses(prompts[:1], *(model[:1] for model in models)) is None
