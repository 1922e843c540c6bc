#!/usr/bin/env bash
# demo-images: plan, data, train, export, verify of custom on v5p-8 in us-east5-a; 16.80 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, 2026).
# Estimated: HOURS
# At most 201.60 USD for the machine: 12 h x 1 attempt; bucket, image and network come on top.
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

# Waits 24h for 4 chips on 1 host, unpaid until then.
# The script deletes the node when the stages have ended, have failed, or have taken too long.
gcloud compute tpus queued-resources create demo-images --project demo-project --zone us-east5-a --node-id demo-images --accelerator-type v5p-8 --runtime-version v2-alpha-tpuv5 --labels gemsmith-run=demo-images --service-account gemsmith@demo-project.iam.gserviceaccount.com --scopes https://www.googleapis.com/auth/cloud-platform --metadata-from-file startup-script=startup.sh --valid-until-duration 24h --async --quiet
