#!/usr/bin/env bash
# demo: plan, data, train, export, verify of tiny-31b on v5p-8 or v6e-8 in us-central1; up to 21.60 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, 2026).
# Estimated: HOURS
# At most 1,036.80 USD for the machine: 12 h x 4 attempts; a preemption begins an attempt that is not counted; bucket, image and network come on top.
set -euo pipefail
cd "$(dirname "$0")"

# What the recipe reads of this machine: RECIPES/demo_base
gcloud storage cp --recursive RECIPES/demo_base gs://runs/team/demo/launched/inputs/checkpoint/

# The recipe, as the machine reads it.
gcloud storage cp --recursive recipe.yaml gs://runs/team/demo/launched/

# A managed job; SkyPilot's own controller, a small machine, starts it again after a preemption.
sky jobs launch --name demo --detach-run --yes task.yaml
