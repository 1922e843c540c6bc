#!/usr/bin/env bash
# own: plan, data, train, export, verify of gemma4-e2b on v6e-1 in us-central1; 2.70 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, an eighth of its v6e-8, 2026, not checked).
# Estimated: HOURS
# At most 129.60 USD for the machine: 12 h x 4 attempts; bucket, image and network come on top.
set -euo pipefail
cd "$(dirname "$0")"

# The recipe, as the machine reads it.
gcloud storage cp --recursive recipe.yaml gs://runs/team/own/launched/

# Credentials of the cluster, into kubectl's own file.
gcloud container clusters get-credentials c1 --region us-central1 --project demo-project

# Creates the job set, or says that it is there as it is.
kubectl --context gke_demo-project_us-central1_c1 apply --filename jobset.yaml
