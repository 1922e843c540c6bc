#!/usr/bin/env bash
# verilog-31b: plan, data, train, export, verify of gemma4-31b on v5p-8 or v6e-8 in us-central1; up to 21.60 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, 2026).
# Estimated: HOURS
# At most 1,036.80 USD for the machine: 12 h x 4 attempts; a preemption begins an attempt that is not counted; bucket, image and network come on top.
set -euo pipefail
cd "$(dirname "$0")"

# The recipe, as the machine reads it.
gcloud storage cp --recursive recipe.yaml gs://runs/team/verilog-31b/launched/

# A managed job; SkyPilot's own controller, a small machine, starts it again after a preemption.
sky jobs launch --name verilog-31b --detach-run --yes task.yaml
