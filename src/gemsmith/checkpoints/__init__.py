"""Hugging Face checkpoint folders: fetched, checked from their headers, and read tensor by tensor."""

from gemsmith.checkpoints.folder import Checkpoint, open_checkpoint, patching_of, read_config
from gemsmith.checkpoints.safetensors import TensorPlace

__all__ = ["Checkpoint", "TensorPlace", "open_checkpoint", "patching_of", "read_config"]
