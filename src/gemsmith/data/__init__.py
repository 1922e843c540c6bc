"""Rows to messages, to ids and loss mask, to packed rows, to batches that are a function of the recipe and the step."""

from gemsmith.data.batches import Batch, Batches, count_steps, load_batches
from gemsmith.data.rows import Document, read_documents
from gemsmith.data.show import show
from gemsmith.data.stage import prepare_data

__all__ = ["Batch", "Batches", "Document", "count_steps", "load_batches", "prepare_data", "read_documents", "show"]
