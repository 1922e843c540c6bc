"""Load tests of the tuned model with vLLM's own client."""
