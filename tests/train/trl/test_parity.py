"""The same recipe on both backends, fp32 on CPU: the same batches, first loss, loss curve and adapters."""

import numpy as np
import pytest
import torch

from gemsmith.data import prepare_data
from gemsmith.export.adapters import read_run_adapter
from gemsmith.recipe_file import build_recipe
from gemsmith.run import open_run
from gemsmith.testing.tiny import make_tokenizer, write_checkpoint
from gemsmith.train.stage import train
from gemsmith.zoo import find_variant, text_tensors


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    """Compiling is most of the JAX side's time; without optimisations it takes half as long, and the numbers are as
    exact."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_weight(tensor, random):
    noise = random.standard_normal(tensor.shape).astype(np.float32)
    if len(tensor.shape) > 1:
        return noise / np.sqrt(tensor.shape[-1])
    # Queries of norm 1 make attention so sharp that fp32 gradients are 4e-5 from those in fp64, in both libraries.
    return (0.25 if "q_norm" in tensor.name else 0.9) + 0.1 * noise


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    def make(name):
        variant, random = find_variant(name), np.random.default_rng(7)
        folder = tmp_path_factory.mktemp("parity") / name
        write_checkpoint(
            variant,
            {tensor.name: make_weight(tensor, random) for tensor in text_tensors(variant)},
            folder,
            dtype="float32",
        )
        make_tokenizer(folder)
        return folder

    return make


def trained(backend, checkpoint, folder, **train_keys):
    keys = {"optimizer_steps": 20, "rows_per_step": 2, "dtype": "float32", "remat": "none", "checkpoint_every": 20}
    recipe = build_recipe(
        {
            "checkpoint": str(checkpoint),
            "data": {"train": {"task": "verilog", "rows": 16}, "max_length": 256},
            "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.0},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3, "weight_decay": 0.01},
            "train": keys | {"backend": backend} | train_keys,
        }
    )
    run = open_run(folder, recipe)
    prepare_data(run)
    return run, train(run)


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tiny-31b", {"attention": "sdpa"}),
        ("tiny-e2b", {"remat": "layer"}),
        ("tiny-26b-a4b", {"attention": "eager"}),
        ("tiny-12b", {"micro_batches": 2}),
    ],
)
def test_both_backends_make_the_same_of_a_recipe(checkpoint_of, tmp_path, name, keys):
    torch.set_num_threads(2)
    checkpoint = checkpoint_of(name)
    shared = {key: value for key, value in keys.items() if key != "attention"}
    jax_run, ours = trained("tunix", checkpoint, tmp_path / "tunix", **shared)
    trl_run, theirs = trained("trl", checkpoint, tmp_path / "trl", **keys)
    for array in ("tokens", "segments", "positions", "loss_mask"):
        assert (jax_run.data / f"{array}.npy").read_bytes() == (trl_run.data / f"{array}.npy").read_bytes()
    exact = ("step", "learning_rate", "real_tokens", "spike", "skipped")
    assert [[getattr(step, key) for key in exact] for step in ours.steps] == [
        [getattr(step, key) for key in exact] for step in theirs.steps
    ]
    assert ours.adapted == theirs.adapted and ours.trained_parameters == theirs.trained_parameters
    assert theirs.steps[0].loss == pytest.approx(ours.steps[0].loss, rel=1e-6)
    assert [step.loss for step in theirs.steps] == pytest.approx([step.loss for step in ours.steps], rel=1e-5)
    assert [step.grad_norm for step in theirs.steps] == pytest.approx([step.grad_norm for step in ours.steps], rel=1e-4)
    expected, found = (read_run_adapter(run, 20).modules for run in (jax_run, trl_run))
    errors = {
        f"{module}.{side}": relative_error(getattr(found[module], side), getattr(expected[module], side))
        for module in expected
        for side in ("a", "b")
    }
    assert max(errors.values()) < 1e-5, max(errors, key=errors.get)
