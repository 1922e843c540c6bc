"""Training on a base of codes: it learns, stops and resumes as any other."""

import signal

import jax
import numpy as np
import pytest

from gemsmith.data.batches import Batches
from gemsmith.errors import RunError, Terminated
from gemsmith.export.adapters import read_run_adapter
from gemsmith.plan.aot.compile import lower_step
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.run import open_run
from gemsmith.train.stage import train

KEYS = {"train": {"dtype": "nf4", "remat": "layer"}, "lora": {"targets": ["q", "down"]}}


@pytest.mark.slow
def test_a_run_on_nf4_learns_and_goes_on_with_the_same_bytes(prepare, tmp_path, monkeypatch):
    whole, stopped = (prepare(tmp_path / name, **KEYS) for name in ("whole", "stopped"))
    record, batch = train(whole), Batches.batch
    assert record.base_dtype == "nf4" and record.steps[-1].loss < record.steps[0].loss - 0.05

    def stop(self, step, rows):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return batch(self, step, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "batch", stop)
        with pytest.raises(Terminated):
            train(stopped)
    again = build_recipe(stopped.recipe.model_dump(mode="json"), ["train.dtype=int8"])
    with pytest.raises(RunError, match=r'train\.dtype is "nf4" there and "int8" here, and train has used it'):
        open_run(stopped.path, again)
    assert train(stopped).resumed_at == (3,)
    expected, found = (read_run_adapter(run, 6).modules for run in (whole, stopped))
    for name, pair in expected.items():
        np.testing.assert_array_equal(found[name].a, pair.a)
        np.testing.assert_array_equal(found[name].b, pair.b)


@pytest.mark.parametrize(("dtype", "codes"), [("nf4", "xui8>"), ("int8", "xi8>")])
@pytest.mark.slow
def test_a_step_on_codes_is_lowered_with_no_weights(dtype, codes):
    """As a plan compiles it; the loop over layers takes codes."""
    values = {"model": "tiny-26b-a4b", "checkpoint": "x", "data": {"train": "x", "max_length": 64}}
    recipe = build_recipe(
        values
        | {"train": {"global_batch_size": 1, "dtype": dtype, "remat": "layer"}, "lora": {"rank": 4, "targets": ["q"]}}
    )
    text = lower_step(recipe, jax.devices()[:1])[0].as_text()
    assert codes in text.split("while")[0]
