"""Rules that the projects share."""

import json
from pathlib import Path

import pytest
import yaml

from gemsmith.importers import port

FOLDER = Path(__file__).parent / "settings"
SFT = json.loads((FOLDER / "sft_config.json").read_text())
AXOLOTL = yaml.safe_load((FOLDER / "axolotl.yaml").read_text())


def test_devices_that_share_a_row_are_not_counted_twice(tmp_path, write):
    shared = AXOLOTL | {"tensor_parallel_size": 2, "context_parallel_size": 2}
    assert port([write(tmp_path, shared)], devices=8).recipe.train.global_batch_size == 8
    assert (
        port([write(tmp_path, AXOLOTL | {"dp_shard_size": 4, "dp_replicate_size": 2})]).recipe.train.global_batch_size
        == 32
    )


@pytest.mark.parametrize(
    ("settings", "overrides", "steps"),
    [
        (AXOLOTL | {"lr_scheduler": "constant", "warmup_steps": None}, [], 0),
        ({key: value for key, value in AXOLOTL.items() if key != "warmup_steps"} | {"lr_scheduler": "constant"}, [], 0),
        (AXOLOTL | {"warmup_steps": None, "warmup_ratio": 0.0}, [], 0),
        (AXOLOTL | {"warmup_steps": 1}, [], 2),
        (SFT | {"lr_scheduler_type": "SchedulerType.CONSTANT"}, ["checkpoint=google/gemma-4-31B-it"], 0),
        (SFT | {"warmup_steps": None, "warmup_ratio": 0}, ["checkpoint=google/gemma-4-31B-it"], 0),
        (SFT | {"warmup_steps": None}, ["checkpoint=google/gemma-4-31B-it"], 0),
    ],
)
def test_the_steps_of_warm_up_are_the_sources(tmp_path, settings, overrides, steps, write):
    assert port([write(tmp_path, settings)], overrides=overrides).recipe.optimizer.warmup(1000) == steps


def test_a_limit_of_no_checkpoints_is_no_limit(tmp_path, write, of):
    ported = port([write(tmp_path, SFT | {"save_total_limit": 0})], overrides=["checkpoint=google/gemma-4-31B-it"])
    assert of(ported.rows, "save_total_limit").status == "none"


def test_devices_that_the_shared_rows_do_not_divide_are_refused(tmp_path, capsys, run, settings):
    assert run(settings(tmp_path, tensor_parallel_size=4), "--devices", 6) == 2
    assert "--devices 6: settings.yaml has 4 devices share a row; give a multiple of 4" in capsys.readouterr().err
