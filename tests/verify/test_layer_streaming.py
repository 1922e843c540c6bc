"""A model with one layer's weights in memory at a time computes what the whole one does."""

import numpy as np
import pytest

from gemsmith.checkpoint import open_checkpoint
from gemsmith.checkpoint.adapter import read_peft_adapter, write_peft_adapter
from gemsmith.verify import logits
from gemsmith.verify.stage import verify

TINY = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b")


@pytest.mark.parametrize("variant", TINY)
def test_layer_by_layer_logits_are_those_of_the_whole_model(tiny_checkpoint, adapter_of, tmp_path, variant):
    adapter, base = adapter_of(variant), open_checkpoint(str(tiny_checkpoint(variant, "bfloat16")))
    write_peft_adapter(adapter, tmp_path, "base")
    prompts = logits.make_prompts(None, base.variant.vocabulary, 0)
    with logits._quiet():
        whole, streamed = (
            logits._base_logits(base, tmp_path, adapter, prompts, streamed=streamed) for streamed in (False, True)
        )
    for name, one, other in zip(("base", "base + adapter", "rounded"), whole, streamed, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5, err_msg=name)  # measured: 0
    assert logits._distance(streamed[0], streamed[1]) > 0.1 and logits._distance(streamed[1], streamed[2]) > 1e-3


def test_a_model_that_fits_only_layer_by_layer_is_compared_so(exported, monkeypatch):
    need = logits.streaming_needed_bytes(
        open_checkpoint(exported.recipe.checkpoint), read_peft_adapter(exported.adapter)
    )
    monkeypatch.setattr(logits, "memory_needed_bytes", lambda base: need + 2)
    monkeypatch.setattr(logits, "free_memory_bytes", lambda: need + 1)
    record = verify(exported)
    assert record.checks[-1].passed and "layer by layer" in record.checks[-1].detail
    assert record.logits_max_abs_difference < 1e-4
