"""The way back: a recipe that starts from an adapter."""

import pytest

from gemsmith.checkpoints.peft import write_peft_adapter
from gemsmith.errors import CheckpointError
from gemsmith.export.stage import start_recipe
from gemsmith.recipe.load import load_recipe

UP = "model.language_model.layers.1.mlp.up_proj"


def test_an_imported_adapter_is_a_recipe_that_starts_from_it(gemsmith, base, adapter, tmp_path):
    code, out, _ = gemsmith("import", adapter, "--base", base, "--out", tmp_path / "on.yaml")
    assert (code, out) == (0, "")
    recipe = load_recipe(tmp_path / "on.yaml")
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.train.init_adapter, recipe.checkpoint) == (
        4,
        8.0,
        str(adapter),
        str(base),
    )
    code, _, err = gemsmith("import", adapter, "--base", base, "--out", tmp_path / "on.yaml")
    assert code == 2 and "already exists" in err


def test_importing_keeps_the_other_keys_of_a_recipe(base, adapter, tmp_path):
    (tmp_path / "my.yaml").write_text(
        "checkpoint: x/y\ndata: {train: rows.jsonl}\noptimizer: {learning_rate: 1e-5}\nlora: {rank: 64, dropout: 0.1}\n"
    )
    (tmp_path / "on.yaml").write_text(start_recipe(str(base), adapter, recipe=tmp_path / "my.yaml"))
    recipe = load_recipe(tmp_path / "on.yaml")
    assert (recipe.optimizer.learning_rate, recipe.lora.dropout, recipe.lora.rank, recipe.data.train) == (
        1e-5,
        0.1,
        4,
        str(tmp_path / "rows.jsonl"),
    )


def test_importing_an_adapter_that_does_not_fit_is_refused(base, adapter, adapter_of, tmp_path, rewrite):
    write_peft_adapter(adapter_of("tiny-12b"), tmp_path / "other", "base")
    with pytest.raises(CheckpointError, match=r"its modules are not those|need"):
        start_recipe(str(base), tmp_path / "other")
    rewrite(adapter, lambda modules: {name: pair for name, pair in modules.items() if name != UP})
    with pytest.raises(CheckpointError, match=r"1 missing \(layers\.1\.mlp\.up_proj\)"):
        start_recipe(str(base), adapter)
