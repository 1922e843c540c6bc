"""How many pictures a row has room for, as far as that can be told before training, and how it was told."""

from typing import NamedTuple

from gemsmith.recipe import Recipe
from gemsmith.records import DataRecord
from gemsmith.sizing import Pictures, pictures_of
from gemsmith.zoo import Variant

_TEXT_TOKENS = 40
"""Of a row of a folder of photos, beside its picture: the template's, the prompt and the class; assumed."""


class PictureCount(NamedTuple):
    """What the rows have room for, None where they are text alone; and sentences that say why."""

    pictures: Pictures | None
    reasons: tuple[str, ...] = ()


def count_pictures(recipe: Recipe, variant: Variant, data: DataRecord | None = None) -> PictureCount:
    """The pictures of a row by the data stage's record, else those that a row of a folder of photos has room for.

    Other rows are taken for text before the data stage.
    """
    if variant.vision is None or (not data.pictures if data else recipe.data.format != "image-folder"):
        return PictureCount(None)
    soft_tokens = recipe.data.image_tokens
    if data is not None:
        patches = soft_tokens * variant.vision.patches_per_token
        images, how = data.most_pictures or -(-data.most_patches // patches), "counted by the data stage"
    else:
        by_length = recipe.data.max_length // (soft_tokens + _TEXT_TOKENS) if recipe.data.packing else 1
        by_patches = recipe.data.max_patches // (soft_tokens * variant.vision.patches_per_token)
        images, how = max(1, min(by_length, by_patches)), f"assumed, with {_TEXT_TOKENS} tokens of text for each"
    pictures = pictures_of(recipe, variant, images=images, soft_tokens=soft_tokens)
    return PictureCount(pictures, _reasons(recipe, variant, pictures, how))


def _reasons(recipe: Recipe, variant: Variant, pictures: Pictures, how: str) -> tuple[str, ...]:
    walked = "forward and back" if pictures.adapters else "forward"
    sentences = [
        f"Every row has room for {pictures.images:,} pictures of {pictures.soft_tokens:,} soft tokens "
        f"({pictures.patches:,} patches), {how}; what a row leaves empty costs as much. They are embedded {walked}."
    ]
    if variant.bidirectional_images and recipe.train.backend == "tunix":
        sentences.append(
            "Sliding layers see a picture's tokens in both directions, which the splash kernel cannot: on TPU they run "
            "as blocks of queries, the global layers by the kernel."
        )
    return tuple(sentences)
