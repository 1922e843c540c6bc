#!/usr/bin/env bash
# verilog-31b: plan, data, train, export, verify of gemma4-31b on v5p-8 in us-central1; 16.80 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, 2026).
# Estimated: HOURS
# At most 806.40 USD for the machine: 12 h x 4 attempts; bucket, image and network come on top.
set -euo pipefail
cd "$(dirname "$0")"

# The recipe, as the machine reads it.
gcloud storage cp --recursive recipe.yaml gs://runs/team/verilog-31b/launched/

# Credentials of the cluster, into kubectl's own file.
gcloud container clusters get-credentials c1 --region us-central1 --project demo-project

# Creates the job set, or says that it is there as it is.
kubectl --context gke_demo-project_us-central1_c1 apply --filename jobset.yaml
