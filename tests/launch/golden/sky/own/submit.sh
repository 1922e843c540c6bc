#!/usr/bin/env bash
# own: plan, data, train, export, verify of gemma4-e2b on v6e-1 or v6e-4 or v5p-8 or v6e-8 in us-central1; up to 21.60 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, 2026).
# Estimated: HOURS
# At most 1,036.80 USD for the machine: 12 h x 4 attempts; a preemption begins an attempt that is not counted; bucket, image and network come on top.
set -euo pipefail
cd "$(dirname "$0")"

# The recipe, as the machine reads it.
gcloud storage cp --recursive recipe.yaml gs://runs/team/own/launched/

# A managed job; SkyPilot's own controller, a small machine, starts it again after a preemption.
sky jobs launch --name own --detach-run --yes task.yaml
