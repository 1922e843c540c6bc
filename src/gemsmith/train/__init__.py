"""Training: LoRA adapters from a checkpoint and packed rows. `stage.train` picks the backend that the recipe names."""
