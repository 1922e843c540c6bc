"""What stands here for what transformers and PEFT do otherwise than training needs; see docs/upstream.md."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import rms_norm
from transformers.utils import logging

from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.errors import CheckpointError


def check_readable(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a config of transformers 5.19 that an older one reads as with heads of 512."""
    text = checkpoint.config.get("text_config", checkpoint.config)
    if "per_layer_config" in text and hasattr(transformers.Gemma4TextConfig, "global_head_dim"):
        raise CheckpointError(
            f"checkpoint {checkpoint.folder}: its config.json has per_layer_config, which transformers "
            f"{transformers.__version__} does not read; install 5.19 or newer, or give it global_head_dim and "
            "num_global_key_value_heads as the published config.json has them"
        )


def adapted(self: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Gives x W + scale * dropout(x) A B like PEFT's own.

    PEFT casts x to float32 first, and scales the wide product, not the narrow. The product with B is added where x W
    lies: a new sum would copy x W first. It has two axes, since autograd copies what changes a view.
    """
    flat = x.reshape(-1, x.shape[-1])
    narrow = self.lora_A["default"](self.lora_dropout["default"](flat)) * self.scaling["default"]
    wide, base = self.lora_B["default"].weight, self.base_layer(flat)
    if torch.is_autocast_enabled(x.device.type):
        wide, narrow = wide.to(base.dtype), narrow.to(base.dtype)
    return base.addmm_(narrow, wide.T).view(*x.shape[:-1], -1)


def adapted_by_itself(self: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The same outside autocast, which the float32 matrices of an adapter on a base of bfloat16 need."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.dtype == torch.bfloat16):
        return adapted(self, x)


def normed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Gives what transformers' own norm gives, also in float32 inside, on CUDA in one kernel instead of nine.

    Autocast would turn x, and what comes out, into float32.
    """
    with torch.autocast(x.device.type, enabled=False):
        if self.with_scale and self.weight.dtype != x.dtype:  # one that is trained
            return rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)
        return rms_norm(x, x.shape[-1:], self.weight if self.with_scale else None, self.eps)


def embedded(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Gives the tokens' rows of an embedding that is trained, in autocast's dtype, as all that follows is.

    Transformers' own are float32, and so would be all that is added to them.
    """
    rows, kind = nn.functional.embedding(tokens, self.weight, self.padding_idx), tokens.device.type
    if torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    return rows * self.embed_scale.to(rows.dtype)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Turns off the progress bars and load reports of transformers, and back on what was on."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
