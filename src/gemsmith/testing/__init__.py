"""Tiny checkpoints and their tokenizer: for tests and the demos."""
