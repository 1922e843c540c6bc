"""Gemma 4's text model in JAX, its loader, and its loss."""

from gemsmith.models.gemma4 import REMAT, Gemma4
from gemsmith.models.load import load_model, partition
from gemsmith.models.loss import token_nll
from gemsmith.models.names import hf_name_of, path_of

__all__ = ["REMAT", "Gemma4", "hf_name_of", "load_model", "partition", "path_of", "token_nll"]
