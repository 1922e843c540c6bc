"""What a compiled TPU program costs, without a TPU: compiled ahead of time, its text read operation by operation."""
