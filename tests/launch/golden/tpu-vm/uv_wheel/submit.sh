#!/usr/bin/env bash
# verilog-31b: plan, data, train, export, verify of gemma4-31b on v5p-8 in us-east5-a; 16.80 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, 2026).
# Estimated: HOURS
# At most 201.60 USD for the machine: 12 h x 1 attempt; bucket, image and network come on top.
set -euo pipefail
cd "$(dirname "$0")"

# Gemsmith's wheel and its locks, which uv installs there.
gcloud storage cp HERE/wheel/gemsmith-VERSION-py3-none-any.whl HERE/wheel/train.lock HERE/wheel/tpu.lock HERE/wheel/gcs.lock HERE/wheel/torch.lock gs://runs/team/verilog-31b/wheel/

# The recipe, as the machine reads it.
gcloud storage cp --recursive recipe.yaml gs://runs/team/verilog-31b/launched/

# Waits 24h for 4 chips on 1 host, unpaid until then.
# The script deletes the node when the stages have ended, have failed, or have taken too long.
gcloud compute tpus queued-resources create verilog-31b --project demo-project --zone us-east5-a --node-id verilog-31b --accelerator-type v5p-8 --runtime-version v2-alpha-tpuv5 --labels gemsmith-run=verilog-31b --service-account gemsmith@demo-project.iam.gserviceaccount.com --scopes https://www.googleapis.com/auth/cloud-platform --metadata-from-file startup-script=startup.sh --valid-until-duration 24h --async --quiet
