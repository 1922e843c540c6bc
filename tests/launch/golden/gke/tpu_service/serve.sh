#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"

# Credentials of the cluster, into kubectl's own file.
gcloud container clusters get-credentials c1 --region us-central1 --project demo-project

# The key that clients send, as a secret, unless there is one.
bash -c 'set -o pipefail
kubectl --context gke_demo-project_us-central1_c1 get secret verilog-31b-server >/dev/null 2>&1 ||
  od -An -N32 -tx1 /dev/urandom | tr -d '"'"' \n'"'"' |
  kubectl --context gke_demo-project_us-central1_c1 create secret generic verilog-31b-server --from-file=key=/dev/stdin
kubectl --context gke_demo-project_us-central1_c1 label secret verilog-31b-server gemsmith-run=verilog-31b --overwrite'

# The tuned model behind vLLM's API, once the job has ended.
kubectl --context gke_demo-project_us-central1_c1 apply --filename service.yaml
