"""Hugging Face checkpoint folders: fetched, checked from their headers, and read tensor by tensor."""

from gemsmith.checkpoint.folder import Checkpoint, open_checkpoint, read_config
from gemsmith.checkpoint.safetensors import TensorPlace

__all__ = ["Checkpoint", "TensorPlace", "open_checkpoint", "read_config"]
