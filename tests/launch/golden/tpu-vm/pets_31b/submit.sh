#!/usr/bin/env bash
# pets-31b: plan, data, train, export, verify of gemma4-31b on v6e-8 in us-east5-a; 21.60 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, 2026).
# Estimated: HOURS
# At most 259.20 USD for the machine: 12 h x 1 attempt; bucket, image and network come on top.
set -euo pipefail
cd "$(dirname "$0")"

# What the recipe reads of this machine: HERE/pets/trainval.jsonl
gcloud storage cp --recursive HERE/pets/trainval.jsonl gs://runs/team/pets-31b/launched/inputs/data-train/

# What the recipe reads of this machine: HERE/pets/test.jsonl
gcloud storage cp --recursive HERE/pets/test.jsonl gs://runs/team/pets-31b/launched/inputs/data-eval/

# 1 image (20.0 B) that data.train names, of HERE/pets, as a few files; each must still be what the list says.
gemsmith launch pack data-train.sha256 HERE/pets images/data-train

# Sends those that do not exist yet; then they are no longer needed here.
gcloud storage rsync --recursive --checksums-only --delete-unmatched-destination-objects images/data-train gs://runs/team/pets-31b/launched/images/data-train
rm -r images/data-train

# 1 image (21.0 B) that data.eval names, of HERE/pets, as a few files; each must still be what the list says.
gemsmith launch pack data-eval.sha256 HERE/pets images/data-eval

# Sends those that do not exist yet; then they are no longer needed here.
gcloud storage rsync --recursive --checksums-only --delete-unmatched-destination-objects images/data-eval gs://runs/team/pets-31b/launched/images/data-eval
rm -r images/data-eval

# The recipe, as the machine reads it.
gcloud storage cp --recursive recipe.yaml gs://runs/team/pets-31b/launched/

# Waits 24h for 8 chips on 1 host, unpaid until then.
# The script deletes the node when the stages have ended, have failed, or have taken too long.
gcloud compute tpus queued-resources create pets-31b --project demo-project --zone us-east5-a --node-id pets-31b --accelerator-type v6e-8 --runtime-version v2-alpha-tpuv6e --labels gemsmith-run=pets-31b --service-account gemsmith@demo-project.iam.gserviceaccount.com --scopes https://www.googleapis.com/auth/cloud-platform --metadata-from-file startup-script=startup.sh --valid-until-duration 24h --async --quiet
