"""Rows to messages, to ids and loss mask, to packed rows, to batches that are a function of the recipe and the step."""
