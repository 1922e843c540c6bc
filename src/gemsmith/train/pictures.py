"""What a run's rows with pictures ask of its checkpoint and its adapters, whichever backend trains."""

from collections.abc import Iterable

from gemsmith.checkpoint import Checkpoint
from gemsmith.data import Batches
from gemsmith.errors import CheckpointError, RecipeError
from gemsmith.pictures.check import Picture
from gemsmith.pictures.patches import Patching, longest_line, read_patching
from gemsmith.recipe import Data, Lora
from gemsmith.zoo import ALL_LINEAR, VISION, Vision, vision_targets


def check_patching(checkpoint: Checkpoint, batches: Batches, data: Data, lora: Lora) -> Patching | None:
    """How the rows' pictures are cut up; None where no row has any.

    Raises RecipeError for adapters on what no row would train, CheckpointError for a checkpoint that takes none, or has
    fewer positions than a picture has patches.
    """
    variant = checkpoint.variant
    if not batches.rows.pictures:
        if vision_targets(variant, lora.targets):
            named = next(kind for kind in lora.targets if kind in (VISION, ALL_LINEAR))
            raise RecipeError(
                f"lora.targets: {named} adapts what embeds pictures, and no row of data.train has one; take it out"
            )
        return None
    if variant.vision is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its config.json has no vision_config, and rows of data.train have "
            "pictures; give one that takes pictures"
        )
    patching = read_patching(checkpoint.config, data.image_tokens)
    for pictures in batches.rows.pictures:
        _check_positions(checkpoint, pictures, patching, variant.vision)
    return patching


def _check_positions(checkpoint: Checkpoint, pictures: Iterable[Picture], patching: Patching, vision: Vision) -> None:
    for picture in pictures:
        longest = longest_line(picture.width, picture.height, patching)
        if longest > vision.positions:
            raise CheckpointError(
                f"{picture.path}: has {longest} patches in a line, and checkpoint {checkpoint.source} positions for "
                f"{vision.positions}; read the rows again with: gemsmith data RUN --force"
            )
