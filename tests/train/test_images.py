"""What rows with images ask of a checkpoint and of adapters, before anything is loaded."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from gemsmith.arch import find_variant
from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.errors import CheckpointError, RecipeError
from gemsmith.images.check import ImageInfo
from gemsmith.images.patches import PatchConfig
from gemsmith.recipe.schema import Data, Lora
from gemsmith.train.inputs import check_patching
from tiny_checkpoints import make_config, with_vision

TINY = with_vision(find_variant("tiny-31b"))
WIDE = ImageInfo(path="wide.png", sha256="", width=60, height=12, soft_tokens=50)
DATA = Data(train="rows.jsonl", image_tokens=70)


def check(variant, images, *targets):
    checkpoint = Checkpoint(source="base", folder=None, variant=variant, config=make_config(variant), places={})
    batches = SimpleNamespace(rows=SimpleNamespace(images=images))
    return check_patching(checkpoint, batches, DATA, Lora(targets=targets or ("q",)))


def test_images_are_cut_as_the_checkpoint_takes_them():
    assert check(TINY, [(WIDE,), ()]) == PatchConfig(budget=70, patch=4, positions=128)
    assert check(TINY, ()) is None and check(find_variant("tiny-31b"), (), "all-linear") is None


@pytest.mark.parametrize("kind", ["vision", "all-linear"])
def test_adapters_on_what_embeds_images_need_rows_that_have_some(kind):
    assert check(TINY, [(WIDE,)], kind)
    with pytest.raises(RecipeError, match=rf"^lora\.targets: {kind} adapts what embeds images, and no row of data"):
        check(TINY, (), "q", kind)


def test_a_checkpoint_of_text_or_with_few_positions_takes_no_images():
    with pytest.raises(CheckpointError, match=r"its config\.json has no vision_config"):
        check(find_variant("tiny-31b"), [(WIDE,)])
    narrow = replace(TINY, vision=replace(TINY.vision, positions=128))
    line = r"^wide\.png: has 210 patches in a line, and checkpoint base positions for 128"
    with pytest.raises(CheckpointError, match=line):
        check(narrow, [(replace(WIDE, width=100_000, height=10),)])
