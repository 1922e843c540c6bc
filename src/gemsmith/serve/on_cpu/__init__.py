"""Put on PYTHONPATH of vLLM on a CPU: Python imports sitecustomize from there as it starts."""
