#!/usr/bin/env bash
# pets-31b: predict of gemma4-31b on 4 x cloud-run-20 in us-central1; 12.76 USD/h (public code: GPU 0.00036522, vCPU 0.000018, GiB 0.000002 a second, without zonal redundancy, 2026, autumn, not checked).
# Not estimated: training is not among the stages.
# At most 612.48 USD for the machine: 12 h x 4 attempts; bucket, image and network come on top.
set -euo pipefail
cd "$(dirname "$0")"

# What the recipe reads of this machine: HERE/pets/test.jsonl
gcloud storage cp --recursive HERE/pets/test.jsonl gs://runs/team/pets-31b/launched/inputs/data-eval/

# 1 image (21.0 B) that data.eval names, of HERE/pets, as a few files; each must still be what the list says.
gemsmith launch pack data-eval.sha256 HERE/pets images/data-eval

# Sends those that do not exist yet; then they are no longer needed here.
gcloud storage rsync --recursive --checksums-only --delete-unmatched-destination-objects images/data-eval gs://runs/team/pets-31b/launched/images/data-eval
rm -r images/data-eval

# The recipe, as the machine reads it.
gcloud storage cp --recursive recipe.yaml gs://runs/team/pets-31b/launched/

# Creates the job, or brings it to what the file says.
gcloud run jobs replace job.yaml --project demo-project --region us-central1 --quiet

# Starts it, and does not wait for its end.
gcloud run jobs execute pets-31b --project demo-project --region us-central1 --async --quiet
