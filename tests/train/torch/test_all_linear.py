"""PEFT's all-linear from training to merged weights: what PEFT itself adapts, and what it opens again."""

import numpy as np
import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer

from gemsmith.arch import vision_tensors
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import read_peft_adapter
from gemsmith.errors import RecipeError
from gemsmith.export.stage import export, start_recipe
from gemsmith.train.stage import train
from gemsmith.verify.stage import verify

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, at import


def adapted(model):
    return {name for name, module in model.get_base_model().named_modules() if isinstance(module, LoraLayer)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-12b", "tiny-26b-a4b"])
def test_every_linear_layer_is_trained_exported_and_opened_by_peft(prepare_images, in_this_process, name):
    torch.set_num_threads(1)
    run = prepare_images("run", name=name, lora={"targets": ["all-linear"]}, train={"max_steps": 2})
    record = train(run)
    export(run)
    verified = verify(run)
    assert [check.name for check in verified.checks if check.passed][-1] == "logits" and verified.logits_effect > 0.1

    def base():
        kind = transformers.AutoModelForImageTextToText
        return kind.from_pretrained(run.recipe.checkpoint, dtype=torch.float32)

    theirs = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules="all-linear"))
    opened = peft.PeftModel.from_pretrained(base(), run.adapter)
    assert adapted(opened) == adapted(theirs) and len(adapted(opened)) == sum(record.adapted.values())
    assert all(value.any() for key, value in opened.named_parameters() if "lora_B" in key)
    # Clip bounds, norms and position embeddings are the base's, byte for byte.
    before, after = open_checkpoint(run.recipe.checkpoint), open_checkpoint(str(run.merged))
    for tensor in vision_tensors(before.variant):
        same = np.array_equal(before.places[tensor.name].copy(), after.places[tensor.name].copy())
        assert same == (tensor.role not in ("vision", "vision_patch")), tensor.name
    # And the way back: the recipe that trains on from it names the same set.
    with pytest.raises(RecipeError, match=r"all-linear was given, and .* tunix adapts projections alone"):
        start_recipe(run.recipe.checkpoint, run.adapter)
    recipe = run.path / "more.yaml"
    recipe.write_text("checkpoint: x\ndata: {train: rows.jsonl}\ntrain: {backend: trl}\n")
    text = start_recipe(run.recipe.checkpoint, run.adapter, recipe=recipe)
    assert "all-linear" in text
    assert read_peft_adapter(run.adapter).modules.keys() == read_peft_adapter(run.checkpoints / "2").modules.keys()
