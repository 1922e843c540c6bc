"""The JAX backend: Gemma 4 with Qwix's adapters in Tunix's PeftTrainer."""
