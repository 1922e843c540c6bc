"""The targets by the name that --provider takes."""

from gemsmith.launch.provider import Target
from gemsmith.launch.providers import cloud_run, gke, skypilot, tpu_vm

TARGETS: dict[str, Target] = {"cloud-run": cloud_run, "tpu-vm": tpu_vm, "gke": gke, "sky": skypilot}
