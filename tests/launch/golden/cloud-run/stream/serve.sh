#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"

# The tuned model behind vLLM's API, once the job has ended.
gcloud run services replace service.yaml --project demo-project --region us-central1 --quiet
