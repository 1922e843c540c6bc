import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gemsmith.checkpoints.peft import write_peft_adapter
from gemsmith.export.stage import export
from gemsmith.runs.records import VerifyRecord
from gemsmith.runs.run import read_record
from gemsmith.verify import logits
from gemsmith.verify.checks import rounding_notices
from gemsmith.verify.stage import verify

DEMO = Path(__file__).parents[2] / "benchmarks" / "records" / "demo" / "verify.json"


def verified(make_run, adapter_of, factor, dtype="bfloat16"):
    """The record of a run whose adapter's B is so many times what it is in the other tests, where 1 moves logits by
    some units."""
    adapter = adapter_of("tiny-12b")
    modules = {name: replace(pair, b=pair.b * np.float32(factor)) for name, pair in adapter.modules.items()}
    run = make_run("tiny-12b", dtype, steps={20: replace(adapter, modules=modules)})
    export(run)
    record = verify(run)
    assert record == read_record(run, VerifyRecord) and record.passed
    return record


def test_an_adapter_that_rounding_takes_is_said(make_run, adapter_of):
    record = verified(make_run, adapter_of, 0.003)
    assert record.logits_rounding > 0.5 * record.logits_effect
    assert 0.5 < record.rounding_loss <= 1
    (notice,) = record.warnings
    assert notice.startswith(
        "Rounding to bfloat16 took much of the adapter out of the merged weights: the adapter moves logits by "
    )
    assert f"{100 * record.rounding_loss:.0f} % of its changes of weights, by norm, are rounded away" in notice
    assert "Serve the base with adapter/" in notice


@pytest.mark.parametrize(("factor", "dtype", "most"), [(1, "bfloat16", 0.05), (0.003, "float32", 1e-3)])
def test_an_adapter_that_rounding_leaves_is_no_notice(make_run, adapter_of, factor, dtype, most):
    record = verified(make_run, adapter_of, factor, dtype)
    assert 0 < record.rounding_loss < most
    assert record.logits_rounding < 0.5 * record.logits_effect
    assert record.warnings == ()


def test_a_folder_of_its_own_says_it_too(gemsmith, tiny_checkpoint, adapter_of, tmp_path):
    adapter = adapter_of("tiny-12b")
    weak = {name: replace(pair, b=pair.b * np.float32(0.003)) for name, pair in adapter.modules.items()}
    write_peft_adapter(replace(adapter, modules=weak), tmp_path / "weak", "base")
    base, out = tiny_checkpoint("tiny-12b", "bfloat16"), tmp_path / "out"
    assert gemsmith("export", "--base", base, "--adapter", tmp_path / "weak", "--out", out)[0] == 0
    code, _, err = gemsmith("verify", out)
    assert code == 0 and "verify: warning: Rounding to bfloat16 took much of the adapter" in err


@pytest.mark.parametrize(("factor", "fires"), [(0.003, True), (1, False)])
def test_where_logits_are_not_compared_the_weights_tell(make_run, adapter_of, monkeypatch, factor, fires):
    monkeypatch.setattr(logits, "free_memory_bytes", lambda: 0)
    record = verified(make_run, adapter_of, factor)
    assert record.logits_effect is record.logits_rounding is None
    assert ["are rounded away; logits were not compared." in notice for notice in record.warnings] == [True] * fires


@pytest.mark.parametrize(("dtypes", "found", "fires"), [
    (["BF16"], {"lost": 0.9, "effect": 0.34, "moved": 0.79}, True),
    (["BF16"], {"lost": 0.9, "effect": 1.0, "moved": 0.51}, True),
    (["BF16"], {"lost": 0.9, "effect": 1.0, "moved": 0.5}, False),
    (["BF16"], {"lost": 0.5}, False),
    (["BF16", "F32"], {"lost": 0.51}, True),
    ([], {}, False),
])  # fmt: skip
def test_logits_decide_and_weights_only_without_them(dtypes, found, fires):
    assert bool(rounding_notices(dtypes, **found)) == fires


def test_the_demos_adapter_is_not_lost():
    record = json.loads(DEMO.read_text())
    moved, effect = record["logits_rounding"], record["logits_effect"]
    assert effect > 1
    assert rounding_notices(["BF16"], effect=effect, moved=moved) == ()
