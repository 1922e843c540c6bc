"""Rows to messages, to ids and loss mask, to packed rows, to batches that are a function of the recipe and the step."""

from gemsmith.data.batches import Batches, count_steps, load_batches
from gemsmith.data.pack import Rows
from gemsmith.data.rows import Document, read_documents
from gemsmith.data.show import show
from gemsmith.data.stage import prepare_data

__all__ = ["Batches", "Document", "Rows", "count_steps", "load_batches", "prepare_data", "read_documents", "show"]
