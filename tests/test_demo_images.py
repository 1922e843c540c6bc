"""The recipe of the images' demo with its shipped base, on images that are made here."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from gemsmith.arch import VisionTower
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.data.prepare.fashion_mnist import CLASSES
from support.images import image_bytes

ROOT = Path(__file__).parents[1]
BASE = ROOT / "recipes" / "demo_images_base"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """The recipe with a few images of each class, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    seeds = itertools.count()
    for part, count in (("train", 4), ("held_out", 1)):
        for name in CLASSES:
            folder = tmp_path / "build" / "fashion_mnist" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.png").write_bytes(image_bytes(28, 28, seed=next(seeds)))
    rows = [f"--set=data.{key}=build/fashion_mnist/{part}" for key, part in (("train", "train"), ("eval", "held_out"))]
    return [str(ROOT / "recipes" / "demo_images.yaml"), *rows, "--set", f"checkpoint={BASE}", "--run", "run"]


def test_the_base_sees_and_is_of_a_kind_whose_images_are_causal():
    """vLLM on a CPU has no other."""
    variant = open_checkpoint(str(BASE)).variant
    assert isinstance(variant.vision, VisionTower) and not variant.bidirectional_images
    assert sum(file.stat().st_size for file in BASE.iterdir()) < 5e6


def test_the_recipe_reads_its_folders_of_photos(gemsmith, settings):
    code, out, err = gemsmith("data", *settings, "--json")
    assert code == 0, err
    record = json.loads(out)
    assert (record["rows"], record["images"], record["dropped"]) == (40, 40, {})
    assert record["soft_tokens"] == 40 * 64 and record["held_out_also_trained"] == 0
    assert record["packed_rows"] == 40


@pytest.mark.slow
def test_the_recipe_trains_on_them(gemsmith, settings):
    settings += ["--set", "train.max_steps=3", "--set", "optimizer.warmup_steps=0"]
    assert gemsmith("data", *settings)[0] == 0
    code, out, err = gemsmith("train", "run", "--json")
    assert code == 0, err
    record = json.loads(out)
    losses = [step["loss"] for step in record["steps"]]
    assert len(losses) == 3 and np.isfinite(losses).all()
    assert not any("vision" in name for name in record["adapted"])
