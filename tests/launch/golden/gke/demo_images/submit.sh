#!/usr/bin/env bash
# demo-images: plan, data, train, export, verify of custom on v5p-8 in us-central1; 16.80 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, 2026).
# Estimated: HOURS
# At most 806.40 USD for the machine: 12 h x 4 attempts; bucket, image and network come on top.
set -euo pipefail
cd "$(dirname "$0")"

# What the recipe reads of this machine: RECIPES/demo_images_base
gcloud storage cp --recursive RECIPES/demo_images_base gs://runs/team/demo-images/launched/inputs/checkpoint/

# 2 images (69.0 B) that data.train names, of HERE/build/fashion_mnist, as a few files; each must still be what the list says.
gemsmith launch pack data-train.sha256 HERE/build/fashion_mnist images/data-train

# Sends those that do not exist yet; then they are no longer needed here.
gcloud storage rsync --recursive --checksums-only --delete-unmatched-destination-objects images/data-train gs://runs/team/demo-images/launched/images/data-train
rm -r images/data-train

# 2 images (75.0 B) that data.eval names, of HERE/build/fashion_mnist, as a few files; each must still be what the list says.
gemsmith launch pack data-eval.sha256 HERE/build/fashion_mnist images/data-eval

# Sends those that do not exist yet; then they are no longer needed here.
gcloud storage rsync --recursive --checksums-only --delete-unmatched-destination-objects images/data-eval gs://runs/team/demo-images/launched/images/data-eval
rm -r images/data-eval

# The recipe, as the machine reads it.
gcloud storage cp --recursive recipe.yaml gs://runs/team/demo-images/launched/

# Credentials of the cluster, into kubectl's own file.
gcloud container clusters get-credentials c1 --region us-central1 --project demo-project

# Creates the job set, or says that it is there as it is.
kubectl --context gke_demo-project_us-central1_c1 apply --filename jobset.yaml
