"""vLLM's OpenAI server, started from its own environment and stopped whatever happens."""
