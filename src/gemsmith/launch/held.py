"""Bytes that a launch's machine holds beside the chip: its program, the run directory, weights that it downloads."""

from collections.abc import Iterable

from gemsmith.checkpoint.fetch import is_hub_id
from gemsmith.launch.target import Request

GB = 10**9
PROGRAM_BYTES = 16 * GB
"""Python and its libraries, rows, a few pictures, and a layer at a time of what is loaded or merged; assumed."""
WEIGHT_BYTES = 2
"""A parameter, in bfloat16."""
_WORTH_SAYING_BYTES = GB // 10
SAVED_BYTES = 12
"""A trained parameter and its two moments, in float32."""
ADAPTER_BYTES = 4


def held_bytes(request: Request, *, with_weights: bool) -> dict[str, int]:
    """What -> bytes. `with_weights`: the base is copied to the machine rather than read in place."""
    train, weights = request.recipe.train, WEIGHT_BYTES * request.parameters
    held = {"the program": PROGRAM_BYTES}
    if (pictures := sum(each.total_bytes for each in request.pictures)) >= _WORTH_SAYING_BYTES:
        held["pictures"] = pictures
    if with_weights:
        held["the base"] = weights
    if "train" in request.stages:
        # One more is being written while those to keep are there.
        held["saved steps"] = (train.keep_checkpoints + 1) * SAVED_BYTES * request.trained_parameters
    if "export" in request.stages:
        held["merged weights"] = weights + ADAPTER_BYTES * request.trained_parameters
    return held


def downloads_base(request: Request) -> bool:
    """Whether the base comes from the Hugging Face hub, or is copied from a bucket that the target does not mount."""
    checkpoint = request.recipe.checkpoint
    return is_hub_id(checkpoint) or checkpoint.startswith("gs://")


def say_held(held: dict[str, int]) -> str:
    """The items and their sum, largest first.

    >>> say_held({"a": 2_000_000_000, "b": 30_000_000_000})
    '32 GB: b 30, a 2'
    """
    largest: Iterable[tuple[str, int]] = sorted(held.items(), key=lambda item: -item[1])
    return f"{sum(held.values()) / GB:.0f} GB: " + ", ".join(f"{what} {count / GB:.2g}" for what, count in largest)
