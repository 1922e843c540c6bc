"""From a laptop to Cloud Run, a TPU VM, Kubernetes or SkyPilot, and back; no scheduler of its own."""
