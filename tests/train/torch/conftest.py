"""A run that nothing stopped, what its checkpoints hold, and what processes need that tests start."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial

import numpy as np
import pytest

from gemsmith.arch import VisionTower, find_variant, text_tensors, vision_tensors
from gemsmith.data import stage
from gemsmith.data.stage import prepare_data
from gemsmith.data.tokenize import open_renderer, render_documents
from gemsmith.images import workers
from gemsmith.images.patches import Patches
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.run import Run, open_run
from support.images import image_bytes
from support.made import made_once, shared_folder
from tiny_checkpoints import make_tokenizer, with_vision, write_checkpoint


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def whole(trained_once):
    """A run of six steps that nothing stopped, and its record. Tests must not change it."""
    return trained_once("trl", train={"backend": "trl"})


def saved_bytes(run, step):
    """Everything that a checkpoint holds but what it says about its attempts."""
    names = ("adapter_model.safetensors", "adapter_config.json", "moments.safetensors")
    return {name: (run.checkpoints / str(step) / name).read_bytes() for name in names}


@pytest.fixture(name="saved_bytes")
def give_saved_bytes():
    return saved_bytes


@pytest.fixture
def trained(whole, tmp_path):
    """A copy of the whole run."""
    shutil.copytree(whole[0].path, tmp_path / "copy")
    return Run(path=tmp_path / "copy", recipe=whole[0].recipe), whole[1]


@pytest.fixture(scope="session")
def even_checkpoint(tmp_path_factory):
    """Returns the folder of a random tiny checkpoint in float32 whose attention is not sharp, and in which no norm and
    no bound is 1: `even_checkpoint("tiny-31b", vision=True)`. Tests must not write into it."""
    root = shared_folder(tmp_path_factory) / "checkpoints"

    def write(name, vision, folder):
        variant, random = find_variant(name), np.random.default_rng(7)
        variant = with_vision(variant) if vision else variant
        tensors = (*text_tensors(variant), *vision_tensors(variant))
        weights = {tensor.name: make_weight(tensor, random) for tensor in tensors}
        write_checkpoint(variant, weights, folder, dtype="float32")
        make_tokenizer(folder, vision=vision)

    @cache
    def make(name, *, vision=False):
        return made_once(root / f"even-{name}{'-vision' * vision}", partial(write, name, vision))

    return make


def make_weight(tensor, random):
    noise = random.standard_normal(tensor.shape).astype(np.float32)
    if tensor.role == "vision_bound":  # a tenth of what goes in is beyond
        return np.asarray((-1 if tensor.name.endswith("_min") else 1) * (1.6 + 0.1 * abs(noise)), np.float32)
    if tensor.name.endswith("bias") or tensor.role == "vision_position":
        return np.float32(0.3) * noise
    if len(tensor.shape) > 1:
        return noise / np.sqrt(tensor.shape[-1])
    # Queries of norm 1 make attention so sharp that fp32 gradients are 4e-5 from those in fp64, in both libraries.
    return (0.25 if "q_norm" in tensor.name else 0.9) + 0.1 * noise


@pytest.fixture
def make_patches():
    """Returns a random image of columns by rows soft tokens: `make_patches(vision, 3, 4)`."""
    random = np.random.default_rng(0)

    def make(vision, columns, rows):
        side = vision.pooling if isinstance(vision, VisionTower) else 1
        grid = np.stack(np.meshgrid(np.arange(columns * side), np.arange(rows * side)), axis=-1).reshape(-1, 2)
        values = random.random((len(grid), vision.patch_dim)).astype(np.float32)
        return Patches(values=values, positions=grid.astype(np.int32), soft_tokens=columns * rows)

    return make


def write_photos(folder):
    """A file of seven rows, of which one is text alone, one has two images, and six are of two classes."""
    folder.mkdir(parents=True)
    rows = [{"prompt": "hello", "response": "wire"}]
    for number in range(6):
        (folder / f"{number}.png").write_bytes(image_bytes(10 + number, 20 - 2 * number, seed=number))
        names = [f"{number}.png", *(["0.png"] if number == 5 else [])]
        rows.append({"prompt": "which ?", "response": f"wire {number % 2}", "images": names})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.fixture
def prepare_images(even_checkpoint, tmp_path):
    """Returns a run over rows with images, those of tmp_path/images: `prepare_images("run", name="tiny-12b")`."""

    def make(folder, *, name="tiny-31b", **sections):
        images = tmp_path / "images"
        rows = images / "rows.jsonl" if images.exists() else write_photos(images)
        values = {
            "checkpoint": str(even_checkpoint(name, vision=True)),
            "data": {"train": str(rows), "max_length": 256, "image_tokens": 70},
            "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1},
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
            "train": {"backend": "trl", "max_steps": 4, "global_batch_size": 2, "dtype": "float32", "remat": "none"},
        }
        for section, keys in sections.items():
            values[section] = values[section] | keys
        run = open_run(tmp_path / folder, build_recipe(values))
        prepare_data(run)
        return run

    return make


@pytest.fixture
def in_this_process(monkeypatch):
    """Images are decoded, and rows rendered, here: a process for it takes a second to start."""

    @contextmanager
    def open_workers(processes):
        with ThreadPoolExecutor(processes) as threads:
            yield threads.submit

    monkeypatch.setattr(workers, "open_workers", open_workers)
    monkeypatch.setattr(
        stage,
        "render_in_processes",
        lambda folder, template, documents, _, on_bad: render_documents(
            open_renderer(folder, template), [*documents], on_bad
        ),
    )
