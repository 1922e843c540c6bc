"""Put on PYTHONPATH of vLLM on a CPU where it takes pictures: Python imports sitecustomize from there as it starts."""
