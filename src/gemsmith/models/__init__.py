"""Gemma 4 in JAX, its loader, and its loss."""

from gemsmith.models.gemma4 import Execution, Gemma4
from gemsmith.models.loader import abstract_model, load_model
from gemsmith.models.loss import token_nll
from gemsmith.models.quantization import base_kinds
from gemsmith.models.sharding import by_path
from gemsmith.models.vision import Images, SoftTokens

__all__ = [
    "Execution", "Gemma4", "Images", "SoftTokens", "abstract_model", "base_kinds", "by_path", "load_model", "token_nll",
]  # fmt: skip
