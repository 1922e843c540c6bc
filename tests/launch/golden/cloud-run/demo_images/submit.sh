#!/usr/bin/env bash
# demo-images: plan, data, train, export, verify, eval of custom on cloud-run-20 in us-central1; 3.19 USD/h (public code: GPU 0.00036522, vCPU 0.000018, GiB 0.000002 a second, without zonal redundancy, 2026, autumn, not checked).
# Estimated: HOURS
# At most 153.12 USD for the machine: 12 h x 4 attempts; bucket, image and network come on top.
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

# Creates the job, or brings it to what the file says.
gcloud run jobs replace job.yaml --project demo-project --region us-central1 --quiet

# Starts it, and does not wait for its end.
gcloud run jobs execute demo-images --project demo-project --region us-central1 --async --quiet
