"""What training starts from, the same bytes with each backend, and what rows with images ask of a checkpoint.

Adapters start as random matrices as PEFT draws them, or as those of a PEFT folder, `train.init_adapter`. No
machine-learning library is imported.
"""

import itertools
import zlib
from pathlib import Path

import numpy as np

from gemsmith.arch import ALL_LINEAR, VISION, Tensor, Variant, lora_targets, vision_targets
from gemsmith.checkpoints import Checkpoint
from gemsmith.checkpoints.peft import WEIGHTS, Adapter, LoraPair, check_finite, check_fit, read_peft_adapter
from gemsmith.data.batches import Batches
from gemsmith.errors import CheckpointError, RecipeError
from gemsmith.images.patches import PatchConfig, longest_line, read_patching
from gemsmith.recipe.schema import Data, Lora, Recipe
from gemsmith.system.files import sha256_file


def name_number(tensor: Tensor) -> int:
    """A number that stands for the tensor in random keys, the same in every process and whatever else is adapted."""
    return zlib.crc32(tensor.name.encode())


def first_pair(tensor: Tensor, rank: int, seed: int, adapter: Adapter | None = None) -> LoraPair:
    """The A (R, in) and B (out, R) that the tensor's adapter starts from: those of the given adapter, or new ones.

    New, A is uniform in ±1/sqrt(in), float32, a function of the seed and the tensor's name, and B is zero.
    """
    if adapter is not None:
        return adapter.modules[tensor.module]
    outputs, inputs = tensor.shape
    random = np.random.Generator(np.random.Philox(key=[seed % 2**64, name_number(tensor)]))
    a = ((random.random((inputs, rank), dtype=np.float32) * 2 - 1) * (1.0 / np.sqrt(inputs))).astype(np.float32)
    return LoraPair(a=a.T, b=np.zeros((outputs, rank), np.float32))


def load_init_adapter(recipe: Recipe, variant: Variant) -> Adapter | None:
    """The adapter of train.init_adapter, None where the recipe names none.

    Raises RecipeError for another rank or scale than lora says, CheckpointError for modules or shapes that are not
    those of model and lora.targets, for values that are NaN or infinite, and for a folder that cannot be read.
    """
    folder = recipe.train.init_adapter
    if folder is None:
        return None
    adapter, lora = read_peft_adapter(Path(folder)), recipe.lora
    for key in ("rank", "alpha", "rslora"):
        found, wanted = getattr(adapter, key), getattr(lora, key)
        if found != wanted:
            raise RecipeError(
                f"train.init_adapter: {folder} has {key} {_plain(found)}, lora.{key} is {_plain(wanted)}; set "
                f"lora.{key}={_plain(found)}"
            )
    source = f"{folder} (train.init_adapter)"
    check_fit(adapter, lora_targets(variant, lora.targets), source=source)
    check_finite(adapter, source=source, otherwise="start from another")
    return adapter


def start_adapter_hash(recipe: Recipe) -> str | None:
    """SHA-256 of the weights of train.init_adapter."""
    folder = recipe.train.init_adapter
    return None if folder is None else sha256_file(Path(folder) / WEIGHTS)


def _plain(value: float | bool) -> str:
    """As a recipe takes it: all digits of a number, so that what is asked for is what is found."""
    return str(value).lower() if isinstance(value, bool) else repr(value).removesuffix(".0")


def check_patching(checkpoint: Checkpoint, batches: Batches, data: Data, lora: Lora) -> PatchConfig | None:
    """How the rows' images are cut up; None where no row has any.

    Raises RecipeError for adapters on what no row would train, CheckpointError for a checkpoint that takes none, or has
    fewer positions than an image has patches.
    """
    variant = checkpoint.variant
    if not batches.rows.images:
        if vision_targets(variant, lora.targets):
            named = next(kind for kind in lora.targets if kind in (VISION, ALL_LINEAR))
            raise RecipeError(
                f"lora.targets: {named} adapts what embeds images, and no row of data.train has one; take it out"
            )
        return None
    if variant.vision is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its config.json has no vision_config, and rows of data.train have "
            "images; give one that takes images"
        )
    patching = read_patching(checkpoint.config, data.image_tokens)
    for image in itertools.chain.from_iterable(batches.rows.images):
        longest, positions = longest_line(image.width, image.height, patching), variant.vision.positions
        if longest > positions:
            raise CheckpointError(
                f"{image.path}: has {longest} patches in a line, and checkpoint {checkpoint.source} positions for "
                f"{positions}; read the rows again with: gemsmith data RUN --force"
            )
    return patching
