"""Gemma 4 in JAX, its loader, and its loss."""

from gemsmith.models.gemma4 import Execution, Gemma4
from gemsmith.models.loader import abstract_model, load_model
from gemsmith.models.loss import token_nll
from gemsmith.models.quantization import base_kinds
from gemsmith.models.sharding import hf_names_of, partition, path_of
from gemsmith.models.vision import Images, SoftTokens

__all__ = [
    "Execution",
    "Gemma4",
    "Images",
    "SoftTokens",
    "abstract_model",
    "base_kinds",
    "hf_names_of",
    "load_model",
    "partition",
    "path_of",
    "token_nll",
]
