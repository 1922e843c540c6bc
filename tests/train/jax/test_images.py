"""Trainings on rows with images: what a step takes, what they record, and what is refused."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gemsmith.arch import find_variant
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import read_peft_adapter
from gemsmith.data import batches as buckets
from gemsmith.data.batches import load_batches
from gemsmith.data.stage import prepare_data
from gemsmith.errors import CheckpointError, DataError, RecipeError, Terminated
from gemsmith.export.adapters import read_run_adapter
from gemsmith.export.stage import export
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.records import DataRecord, TrainRecord
from gemsmith.runs.run import is_up_to_date, open_run, read_record
from gemsmith.train.inputs import ImageFeed
from gemsmith.train.jax import backend
from gemsmith.train.jax.images import image_input
from gemsmith.train.stage import train
from gemsmith.verify.stage import verify
from support.images import image_bytes
from tiny_checkpoints import make_checkpoint, with_vision

# Two layers, which the tower of each kind is put before; E2B's has per-layer inputs, and causal attention.
SMALL = with_vision(
    replace(find_variant("tiny-e2b"), name="custom", layers=2, embed_dim=32, ffn=64, kv_shared_layers=0)
)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "small"
    return make_checkpoint(replace(SMALL, vision=replace(SMALL.vision, layers=1)), folder, dtype="float32", shards=1)


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder of 12 images of two classes, in three shapes."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(12):
        name = folder / ("red" if number % 2 else "blue") / f"{number}.png"
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(image_bytes(12 + 12 * (number % 3), 12, seed=number))
    return folder


def make_run(folder, base, images, **sections):
    values = {
        "checkpoint": str(base),
        "data": {
            "train": str(images),
            "format": "image-folder",
            "prompt": "Which colour?",
            "max_length": 96,
            "image_tokens": 70,
            "packing": False,
        },
        "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "train": {"max_steps": 4, "global_batch_size": 2, "dtype": "float32", "remat": "none", "save_steps": 2},
    }
    for name, keys in sections.items():
        values[name] = values[name] | keys
    run = open_run(folder, build_recipe(values))
    prepare_data(run)
    return run


def first_image(run, *, step):
    return load_batches(run).batch(step).images[0][0].path


@pytest.fixture(scope="module")
def trained_once(base, images, tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("whole") / "run", base, images)
    return run, train(run)


@pytest.mark.slow
def test_a_run_learns_from_images_and_records_them(trained_once):
    run, record = trained_once
    assert is_up_to_date(run, "train")
    batches = load_batches(run)
    seen = [[one for row in batches.batch(step).images for one in row] for step in range(1, 5)]
    assert [step.images for step in record.steps] == [len(images) for images in seen]
    tokens = [sum(image.soft_tokens for image in images) for images in seen]
    assert [step.soft_tokens for step in record.steps] == tokens
    assert record.images.seen == sum(map(len, seen)) and record.images.soft_tokens == sum(tokens)
    most = max(map(len, batches.rows.images))
    assert record.images.padding_fraction == pytest.approx(1 - sum(tokens) / (4 * 2 * most * 64))
    assert record.images.per_s > 0
    assert record.steps[-1].loss < record.steps[0].loss


@pytest.mark.slow
def test_steps_with_less_room_for_images_train_the_adapter_of_one_size(base, tmp_path, monkeypatch):
    """Rows have one to four images; dropout in the tower, too, whose masks do not depend on the room."""
    rows = [
        {"images": [f"{row}{number}.png" for number in range(1 + row // 2 % 4)], "prompt": "Which?", "response": "a"}
        for row in range(8)
    ]
    for name in {name for row in rows for name in row["images"]}:
        (tmp_path / name).write_bytes(image_bytes(12, 12, seed=int(name[:2])))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "data": {"train": str(file), "format": "auto", "prompt": None, "max_length": 320, "max_patches": 4096},
        "lora": {"targets": ["q", "v", "down", "vision"]},
        "train": {"max_steps": 8, "global_batch_size": 1},
    }
    runs, records = [], []
    for most in (1, 2):
        monkeypatch.setattr(buckets, "MOST_BUCKETS", most)
        runs.append(make_run(tmp_path / str(most), base, file, **sections))
        records.append(train(runs[-1]))
    one, few = (record.images for record in records)
    assert len(one.buckets) == 1 and len(few.buckets) == 2
    told = [bucket.model_copy(update={"padding_fraction": None}) for bucket in few.buckets]
    assert told == [bucket for bucket in read_record(runs[1], DataRecord).buckets if bucket.steps]
    sizes = [bucket.images * bucket.soft_tokens * bucket.steps for bucket in few.buckets]
    assert (
        few.padding_fraction == pytest.approx(1 - few.soft_tokens / sum(sizes))
        and few.padding_fraction < one.padding_fraction
    )
    losses = [[step.loss for step in record.steps] for record in records]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # measured: 4e-6 after eight steps
    expected, found = (read_run_adapter(run).modules for run in runs)
    for name, pair in expected.items():
        for side in "ab":
            norm = np.linalg.norm(getattr(pair, side))
            assert np.linalg.norm(getattr(found[name], side) - getattr(pair, side)) < 1e-4 * norm, (name, side)


@pytest.mark.slow
def test_an_update_depends_on_what_a_image_shows(trained_once, base, images, tmp_path):
    other = tmp_path / "images"
    shutil.copytree(images, other)
    for file in other.rglob("*.png"):
        with Image.open(file) as image:
            Image.new("RGB", image.size).save(file)
    run = make_run(tmp_path / "run", base, other)
    np.testing.assert_array_equal(np.load(run.data / "tokens.npy"), np.load(trained_once[0].data / "tokens.npy"))
    assert train(run).steps[0].loss != trained_once[1].steps[0].loss


@pytest.mark.slow
def test_a_image_that_is_gone_ends_training_at_its_step_and_what_was_trained_is_saved(
    trained_once, base, images, tmp_path, saved_bytes
):
    own = tmp_path / "images"
    shutil.copytree(images, own)
    run = make_run(tmp_path / "run", base, own)
    path = first_image(run, step=4)
    data = Path(path).read_bytes()
    Path(path).unlink()
    with pytest.raises(
        DataError,
        match=rf"^step 4 of training: {path}: does not exist, or not a file; put it back .*; step 3 is saved$",
    ):
        train(run)
    assert not run.record_file("train").exists()
    Path(path).write_bytes(data)
    assert train(run).resumed_at == (3,)
    assert saved_bytes(run, 4) == saved_bytes(trained_once[0], 4)


@pytest.mark.slow
def test_a_image_that_has_changed_is_found_before_the_first_step_is_compiled(base, images, tmp_path, monkeypatch):
    own = tmp_path / "images"
    shutil.copytree(images, own)
    run = make_run(tmp_path / "run", base, own)
    path = first_image(run, step=1)
    Path(path).write_bytes(image_bytes(12, 12, seed=99))
    monkeypatch.setattr(backend, "compile_program", lambda *_: pytest.fail("compiled"))
    with pytest.raises(DataError, match=f"^{path}: has changed since its row was read; put it back as it was"):
        train(run)


@pytest.mark.slow
def test_a_training_that_is_told_to_stop_goes_on_with_the_same_images(
    trained_once, base, images, tmp_path, saved_bytes
):
    run, taken, take = make_run(tmp_path / "run", base, images), [], ImageFeed.take

    def interrupted(feed):
        taken.append(take(feed))
        if len(taken) == 3:
            signal.raise_signal(signal.SIGTERM)
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageFeed, "take", interrupted)
        with pytest.raises(Terminated, match="step 3 is saved"):
            train(run)
    record = train(run)
    assert record.resumed_at == (3,) and record.images.seen == trained_once[1].images.seen
    assert saved_bytes(run, 4) == saved_bytes(trained_once[0], 4)


@pytest.mark.slow
def test_a_checkpoint_that_takes_no_images_is_named(trained_once, base):
    run, _ = trained_once
    checkpoint = open_checkpoint(str(base))
    blind = replace(checkpoint, variant=replace(checkpoint.variant, vision=None))
    with pytest.raises(CheckpointError, match=f"^checkpoint {base}: its config.json has no vision_config"):
        image_input(blind, load_batches(run), run.recipe.data, run.recipe.lora)


@pytest.mark.slow
def test_a_image_with_more_patches_in_a_line_than_positions_is_refused(trained_once, base):
    run, _ = trained_once
    checkpoint = open_checkpoint(str(base))
    few = replace(checkpoint.variant.vision, positions=20)
    narrow = replace(checkpoint, variant=replace(checkpoint.variant, vision=few))
    with pytest.raises(CheckpointError, match=r"png: has 24 patches in a line, and checkpoint .* positions for 20"):
        image_input(narrow, load_batches(run), run.recipe.data, run.recipe.lora)


@pytest.mark.slow
def test_a_fault_is_known_as_many_steps_ahead_as_asked(trained_once, base, tmp_path):
    """Several hosts need that: they stop two steps after one has asked for it."""
    run, _ = trained_once
    how = image_input(open_checkpoint(str(base)), load_batches(run), run.recipe.data, run.recipe.lora)
    batches = load_batches(run)
    lines = [*batches.rows.images.lines]
    missing = int(batches.order[6])
    lines[missing] = lines[missing].replace(b".png", b".gone")
    images = replace(batches.rows.images, lines=lines)
    batches = replace(batches, rows=replace(batches.rows, images=images))
    feed = how.feed(batches, rows=[0, 1], first=1, ahead=2)
    faults = []
    while (taken := feed.take()) is not None:
        arrays = how.arrays(1, *taken)
        assert arrays["patches"].shape[:2] == (2, how.shape(1).images)
        faults.append(feed.fault is not None)
    assert faults == [False, True, True]
    feed.close()


@pytest.mark.slow
def test_adapters_on_the_tower_are_trained_exported_merged_and_seen_by_peft(base, images, tmp_path):
    """verify compares every tensor without an adapter byte by byte, clip bounds among them, and logits with a
    image."""
    run = make_run(tmp_path / "run", base, images, lora={"targets": ["q", "v", "vision"]})
    record = train(run)
    assert record.adapted == {"q": 2, "v": 2, "vision": 8}
    export(run)
    record = verify(run)
    assert record.passed and record.changed_tensors == record.expected_tensors == 12
    assert {check.name: check.passed for check in record.checks}["logits"] is True
    modules = read_peft_adapter(run.adapter).modules
    assert "model.vision_tower.encoder.layers.0.mlp.up_proj.linear" in modules
    assert all(pair.b.any() for pair in modules.values())


@pytest.mark.slow
def test_adapters_on_the_tower_need_rows_with_images(trained_once, base):
    run, _ = trained_once
    batches = load_batches(run)
    batches = replace(batches, rows=replace(batches.rows, images=()))
    lora = run.recipe.lora.model_copy(update={"targets": ("q", "vision")})
    with pytest.raises(RecipeError, match=r"^lora\.targets: vision adapts what embeds images, and no row"):
        image_input(open_checkpoint(str(base)), batches, run.recipe.data, lora)


DECODING = """
import contextlib, os, sys
from gemsmith import cli
from gemsmith.images import workers
open_workers = workers.open_workers
@contextlib.contextmanager
def watched(processes):
    with open_workers(processes) as ask:
        def asked(request):
            if request.func is workers.patchify:
                print("DECODED", request.args[0].path)
                if request.args[0].path == os.environ["GONE"]:
                    os.unlink(request.args[0].path)
            return ask(request)
        yield asked
workers.open_workers = watched
if "STEPS" in os.environ:
    import time
    from gemsmith.train.inputs import ImageFeed
    take, taken = ImageFeed.take, []
    def held(feed):
        taken.append(1)
        time.sleep(600 if len(taken) > int(os.environ["STEPS"]) else 0)
        return take(feed)
    ImageFeed.take = held
cli.main(sys.argv[1:])
"""


def start(run, *options, devices=1, gone="", steps=None):
    """Starts `gemsmith train`, which prints the images that it decodes; one of them is gone just before.

    After so many `steps` it waits to be killed.
    """
    environment = (
        os.environ
        | {
            "GONE": str(gone),
            "JAX_NUM_CPU_DEVICES": str(devices),  # by XLA_FLAGS, a process more would ask XLA about them
            "JAX_PLATFORMS": "cpu",
        }
        | ({} if steps is None else {"STEPS": str(steps)})
    )
    command = [sys.executable, "-W", "ignore", "-c", DECODING, "train", str(run.path), *map(str, options)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(process):
    _, error = process.communicate()
    assert process.returncode == 0, error


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_adapter_and_leaves_no_decoders(base, images, tmp_path):
    sections = {"train": {"max_steps": 12}, "lora": {"targets": ["q", "vision"]}}
    whole, killed = (make_run(tmp_path / name, base, images, **sections) for name in ("whole", "killed"))
    finish(start(whole))
    first = start(killed, steps=8)
    while not (killed.checkpoints / "6").is_dir():
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.01)
    first.kill()
    first.communicate(timeout=60)  # decoders that were left would hold its stderr open
    assert first.returncode == -signal.SIGKILL
    finish(start(killed))
    assert read_record(killed, TrainRecord).resumed_at
    one, other = (read_run_adapter(run).modules for run in (whole, killed))
    assert all((one[name].a == other[name].a).all() and (one[name].b == other[name].b).all() for name in one)


def same_adapters(one, other):
    """Within 5e-4 of each matrix's norm: sums in another order, through AdamW, make 1.4e-4 on a processor with AMX."""
    expected, found = (read_run_adapter(run).modules for run in (one, other))
    for name, pair in expected.items():
        for side in "ab":
            distance = np.linalg.norm(getattr(found[name], side) - getattr(pair, side))
            assert distance < 5e-4 * np.linalg.norm(getattr(pair, side)), (name, side)


def start_together(run, **options):
    """The run on two hosts; of each, how it ended, what it decoded and what it said last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = ("--coordinator", f"127.0.0.1:{free.getsockname()[1]}", "--processes", 2, "--process-id")
    started = [start(run, *group, host, **options) for host in (0, 1)]
    ended = [process.communicate(timeout=500) for process in started]
    decoded = [{line.split()[1] for line in out.splitlines() if line.startswith("DECODED")} for out, _ in ended]
    return [process.returncode for process in started], decoded, [err.strip().splitlines()[-1] for _, err in ended]


@pytest.mark.slow
def test_two_hosts_decode_their_own_images_stop_together_and_train_the_adapter_of_one(base, images, tmp_path):
    """Of two rows a step the second host has the second; an image that only it reads is gone, and put back."""
    own = tmp_path / "images"
    shutil.copytree(images, own)
    lora = {"targets": ["q", "v", "vision"]}
    alone, together = (make_run(tmp_path / name, base, own, lora=lora) for name in ("alone", "together"))
    alone_process = start(alone, devices=2)
    batches = [load_batches(together).batch(step) for step in range(1, 5)]
    read = [{batch.images[row][0].path for batch in batches} for row in (0, 1)]
    gone = Path(batches[3].images[1][0].path)
    finish(alone_process)
    data = gone.read_bytes()
    codes, decoded, said = start_together(together, gone=gone)
    assert codes == [2, 2], said
    assert said[0] == "error: host 1 cannot read its rows, so no host trains; it says why; step 2 is saved"
    assert said[1].startswith(f"error: step 4 of training: {gone}: does not exist") and "step 2 is saved" in said[1]
    assert decoded == read
    gone.write_bytes(data)
    codes, decoded, said = start_together(together)
    assert codes == [0, 0], said
    assert decoded == [{batches[step].images[row][0].path for step in (2, 3)} for row in (0, 1)]
    one, two = (read_record(run, TrainRecord) for run in (alone, together))
    assert (two.hosts, two.resumed_at) == (2, (2,)) and two.images.seen == one.images.seen
    assert [step.loss for step in two.steps] == pytest.approx([step.loss for step in one.steps], rel=1e-6)
    same_adapters(alone, together)


@pytest.mark.slow
def test_two_devices_train_the_adapter_of_one(base, images, tmp_path):
    """Rows and their images over fsdp 2, with dropout in the tower, too."""
    lora = {"targets": ["q", "v", "down", "vision"], "dropout": 0.1}
    runs = [make_run(tmp_path / str(devices), base, images, lora=lora) for devices in (1, 2)]
    for run, devices in zip(runs, (1, 2), strict=True):
        finish(start(run, devices=devices))
    one, other = (read_record(run, TrainRecord) for run in runs)
    assert (one.mesh["fsdp"], other.mesh["fsdp"]) == (1, 2) and one.images.seen == other.images.seen
    assert [step.loss for step in other.steps] == pytest.approx([step.loss for step in one.steps], rel=1e-5)
    same_adapters(*runs)
