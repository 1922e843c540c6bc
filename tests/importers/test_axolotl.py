"""Axolotl's YAML."""

from pathlib import Path

import yaml

from gemsmith.importers import port

FOLDER = Path(__file__).parent / "settings"
AXOLOTL = yaml.safe_load((FOLDER / "axolotl.yaml").read_text())

NOT_SET = dict.fromkeys(
    (
        "lora_dropout",
        "lr_scheduler",
        "weight_decay",
        "warmup_steps",
        "max_grad_norm",
        "seed",
        "adam_beta2",
        "adam_epsilon",
        "save_total_limit",
    )
)


def test_axolotls_nulls_are_axolotls_defaults(tmp_path, write):
    recipe = port([write(tmp_path, AXOLOTL | NOT_SET)]).recipe
    absent = port([write(tmp_path, {key: value for key, value in AXOLOTL.items() if key not in NOT_SET})]).recipe
    assert recipe == absent
    assert (recipe.lora.dropout, recipe.optimizer.weight_decay, recipe.seed) == (0.0, 0.0, 42)
    assert (recipe.optimizer.max_grad_norm, recipe.optimizer.warmup_ratio, recipe.optimizer.schedule) == (
        1.0,
        0.03,
        "cosine",
    )


def test_a_null_bf16_of_axolotl_is_off(tmp_path, write):
    assert port([write(tmp_path, AXOLOTL | {"bf16": None})]).recipe.train.dtype == "float32"
