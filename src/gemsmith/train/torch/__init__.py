"""The PyTorch backend: Gemma 4 in transformers with PEFT's adapters in TRL's SFTTrainer."""
