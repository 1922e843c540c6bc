"""PEFT's adapter_config.json."""

import json
from pathlib import Path

import pytest

from gemsmith.errors import RecipeError
from gemsmith.importers import port

FOLDER = Path(__file__).parent / "settings"
ADAPTER = json.loads((FOLDER / "adapter_config.json").read_text())


def test_what_an_adapter_leaves_out_is_pefts_default(tmp_path, write):
    few = {key: ADAPTER[key] for key in ("peft_type", "base_model_name_or_path", "target_modules")}
    lora = port([write(tmp_path, few)]).recipe.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.rslora) == (8, 8.0, 0.0, False)


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_dora", True), ("rank_pattern", {"q_proj": 4}), ("modules_to_save", ["lm_head"]), ("bias", "all")],
)
def test_an_adapter_of_another_kind_is_a_difference(tmp_path, write, key, value):
    differences = port([write(tmp_path, ADAPTER | {key: value})]).differences
    assert [row.key.partition(".")[0] for row in differences] == [key]


def test_another_task_than_language_modelling_is_refused(tmp_path, write):
    with pytest.raises(RecipeError, match="task_type is 'SEQ_CLS': no language modeling"):
        port([write(tmp_path, ADAPTER | {"task_type": "SEQ_CLS"})])
