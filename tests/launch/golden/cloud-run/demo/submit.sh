#!/usr/bin/env bash
# demo: plan, data, train, export, verify, eval of tiny-31b on cloud-run-20 in us-central1; 3.19 USD/h (public code: GPU 0.00036522, vCPU 0.000018, GiB 0.000002 a second, without zonal redundancy, 2026, autumn, not checked).
# Estimated: HOURS
# At most 153.12 USD for the machine: 12 h x 4 attempts; bucket, image and network come on top.
set -euo pipefail
cd "$(dirname "$0")"

# What the recipe reads of this machine: RECIPES/demo_base
gcloud storage cp --recursive RECIPES/demo_base gs://runs/team/demo/launched/inputs/checkpoint/

# The recipe, as the machine reads it.
gcloud storage cp --recursive recipe.yaml gs://runs/team/demo/launched/

# Creates the job, or brings it to what the file says.
gcloud run jobs replace job.yaml --project demo-project --region us-central1 --quiet

# Starts it, and does not wait for its end.
gcloud run jobs execute demo --project demo-project --region us-central1 --async --quiet
