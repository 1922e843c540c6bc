"""The same recipe on both backends, fp32 on CPU: the same batches, first loss, loss curve and adapters."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gemsmith.data.batches import open_rows
from gemsmith.data.stage import prepare_data
from gemsmith.export.adapters import read_run_adapter, read_run_weights
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Lora
from gemsmith.runs.run import open_run
from gemsmith.train.stage import train
from support.images import image_bytes

UPDATES = 10


def trained(backend, checkpoint, folder, data=None, lora=None, *, epsilon=1e-8, **train_keys):
    keys = {"max_steps": UPDATES, "global_batch_size": 2, "dtype": "float32", "remat": "none", "save_steps": UPDATES}
    recipe = build_recipe(
        {
            "checkpoint": str(checkpoint),
            "data": data or {"train": {"task": "verilog", "rows": 16}, "max_length": 256},
            "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.0} | (lora or {}),
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3, "weight_decay": 0.01, "epsilon": epsilon},
            "train": keys | {"backend": backend} | train_keys,
        }
    )
    run = open_run(folder, recipe)
    prepare_data(run)
    return run, train(run)


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.slow
def test_both_backends_make_the_same_of_a_recipe(even_checkpoint, tmp_path):
    torch.set_num_threads(2)
    checkpoint = even_checkpoint("tiny-31b")
    one = trained("tunix", checkpoint, tmp_path / "tunix")
    assert_alike(one, trained("trl", checkpoint, tmp_path / "trl", attention="sdpa"))


def test_the_kept_training_on_a_gpu_has_the_losses_of_the_one_in_jax_on_a_cpu():
    records = Path(__file__).parents[3] / "benchmarks" / "records"
    ours, theirs = (json.loads((records / name / "train.json").read_text()) for name in ("demo", "demo_h200"))
    assert (ours["backend"], theirs["backend"], theirs["machine"]) == ("tunix", "trl", "1xh200")
    errors = [abs(b["loss"] / a["loss"] - 1) for a, b in zip(ours["steps"], theirs["steps"], strict=True)]
    assert max(errors[:10]) < 1e-6 and max(errors[:50]) < 1e-4 and max(errors) < 0.02


def write_rows_with_images(folder):
    """Eight rows of which some pack into one: images longer than the window of 64, two that touch, and text."""
    folder.mkdir()
    rows = []
    for number in range(8):
        sizes = [[(40, 40)], [(60, 20), (20, 60)], [(12, 12)], []][number % 4]
        names = [f"{number}-{place}.png" for place in range(len(sizes))]
        for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
            (folder / name).write_bytes(image_bytes(*size, seed=10 * number + place))
        images = {"images": names} if names else {}
        rows.append({"prompt": f"what is in {number} ?", "response": f"wire {number}, and more of it"} | images)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tiny-31b", {"attention": "documents"}),
        # Adam divides a gradient by its own size. Rounding in those of v's A that are nearly zero came to 0.7e-5 to
        # 1.1e-5 of it with the usual epsilon; with this one all is below 5e-6.
        ("tiny-e2b", {"remat": "layer", "epsilon": 1e-6}),
        ("tiny-26b-a4b", {"attention": "eager"}),
        ("tiny-12b", {"gradient_accumulation_steps": 2, "attention": "sdpa"}),
    ],
)
def test_both_backends_make_the_same_of_rows_with_images(even_checkpoint, tmp_path, name, keys):
    torch.set_num_threads(1)
    checkpoint, rows = even_checkpoint(name, vision=True), write_rows_with_images(tmp_path / "rows")
    data = {"train": str(rows), "max_length": 320, "image_tokens": 140}
    shared = {key: value for key, value in keys.items() if key != "attention"}
    jax_run, ours = trained("tunix", checkpoint, tmp_path / "tunix", data, **shared)
    trl_run, theirs = trained("trl", checkpoint, tmp_path / "trl", data, **keys)
    packed = open_rows(trl_run)
    longest = max(image.soft_tokens for images in packed.images for image in images)
    assert longest > 64 and max(len(packed.documents(row)) for row in range(len(packed))) > 1
    assert theirs.images.seen == ours.images.seen >= 30
    assert_alike((jax_run, ours), (trl_run, theirs))


@pytest.mark.slow
def test_both_backends_train_the_same_weights_beside_a_frozen_tower(even_checkpoint, tmp_path):
    torch.set_num_threads(1)
    checkpoint, rows = even_checkpoint("tiny-e2b", vision=True), write_rows_with_images(tmp_path / "rows")
    data = {"train": str(rows), "max_length": 320, "image_tokens": 140}
    lora, keys = Lora().model_dump(mode="json"), {"method": "full", "max_steps": 4, "save_steps": 4}
    (jax_run, ours), (trl_run, theirs) = (
        trained(backend, checkpoint, tmp_path / backend, data, lora, **keys) for backend in ("tunix", "trl")
    )
    assert theirs.images.seen == ours.images.seen > 4
    assert [step.loss for step in theirs.steps] == pytest.approx([step.loss for step in ours.steps], rel=1e-5)
    expected, found = (read_run_weights(run, 4) for run in (jax_run, trl_run))
    errors = {name: relative_error(found[name], value) for name, value in expected.items()}
    assert max(errors.values()) < 2e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.slow
def test_both_backends_make_the_same_of_adapters_on_the_tower(even_checkpoint, tmp_path):
    torch.set_num_threads(1)
    checkpoint, rows = even_checkpoint("tiny-e2b", vision=True), write_rows_with_images(tmp_path / "rows")
    data = {"train": str(rows), "max_length": 320, "image_tokens": 140}
    lora = {"targets": ["q", "v", "vision"]}
    # Of ten updates of the E2B's, one value lay on a bound of its tower but for rounding, and one backend clipped it.
    steps = {"max_steps": 20, "save_steps": 20}
    one, other = (trained(backend, checkpoint, tmp_path / backend, data, lora, **steps) for backend in ("tunix", "trl"))
    assert one[1].adapted["vision"] == 22
    # Measured: up to 1.3e-4 on a processor with AMX, of the tower's keys, whose gradients are nearly 0.
    assert_alike(one, other, bound=5e-4)


def assert_alike(one, other, *, bound=1e-5):
    """The same batches, steps and adapters, but for rounding: measured 1.4e-5 for the tower, else 6.8e-6."""
    (jax_run, ours), (trl_run, theirs) = one, other
    for array in ("tokens", "segments", "positions", "loss_mask"):
        assert (jax_run.data / f"{array}.npy").read_bytes() == (trl_run.data / f"{array}.npy").read_bytes()
    exact = ("step", "learning_rate", "real_tokens", "images", "soft_tokens", "spike", "skipped", "token_accuracy")
    assert [[getattr(step, key) for key in exact] for step in ours.steps] == [
        [getattr(step, key) for key in exact] for step in theirs.steps
    ]
    assert ours.adapted == theirs.adapted and ours.trained_parameters == theirs.trained_parameters
    assert theirs.steps[0].loss == pytest.approx(ours.steps[0].loss, rel=1e-6)
    assert [step.loss for step in theirs.steps] == pytest.approx([step.loss for step in ours.steps], rel=1e-5)
    assert [step.grad_norm for step in theirs.steps] == pytest.approx([step.grad_norm for step in ours.steps], rel=1e-4)
    expected, found = (read_run_adapter(run, len(ours.steps)).modules for run in (jax_run, trl_run))
    errors = {
        f"{module}.{side}": relative_error(getattr(found[module], side), getattr(expected[module], side))
        for module in expected
        for side in ("a", "b")
    }
    assert max(errors.values()) < bound, sorted(((error, name) for name, error in errors.items()), reverse=True)[:5]
