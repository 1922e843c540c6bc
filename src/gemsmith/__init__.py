"""Gemsmith: one recipe to plan, fine-tune, export, serve and compare Gemma 4 on TPU and GPU."""

__version__ = "0.1.0"
