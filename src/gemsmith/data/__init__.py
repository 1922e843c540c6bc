"""Rows to messages, to ids and loss mask, to packed rows, to batches that are a function of the recipe and the step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemsmith.data.batches import Batches, load_batches
    from gemsmith.data.dataset import read_documents
    from gemsmith.data.packing import Rows
    from gemsmith.data.stage import prepare_data

__all__ = ["Batches", "Rows", "load_batches", "prepare_data", "read_documents"]
_MODULES = dict(zip(__all__, ("batches", "packing", "batches", "stage", "dataset"), strict=True))


def __getattr__(name: str) -> Any:
    """Loaded when asked for: a process that renders rows needs none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
