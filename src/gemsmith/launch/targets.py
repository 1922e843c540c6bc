"""The targets by the name that --on takes."""

from gemsmith.launch import cloud_run, gke, sky, tpu_vm
from gemsmith.launch.target import Target

TARGETS: dict[str, Target] = {"cloud-run": cloud_run, "tpu-vm": tpu_vm, "gke": gke, "sky": sky}
