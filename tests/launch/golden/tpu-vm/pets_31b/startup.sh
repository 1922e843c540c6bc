#!/usr/bin/env bash
# pets-31b: plan, data, train, export, verify of gemma4-31b on v6e-8 in us-east5-a; 21.60 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, 2026).
# Estimated: HOURS
# At most 259.20 USD for the machine: 12 h x 1 attempt; bucket, image and network come on top.
NAME=pets-31b  # of the queued resource and its node
PROJECT=demo-project  # --project
ZONE=us-east5-a  # --zone
ROOT=gs://runs/team/pets-31b  # --bucket, and the name
IMAGE=us-east5-docker.pkg.dev/demo-project/gemsmith/train-tpu:VERSION  # docker/train-tpu.Dockerfile, as docker/cloudbuild.yaml builds it
TIMEOUT_S=43200  # --timeout-hours 12
SECRET=''  # the Hugging Face token's in Secret Manager; empty: none is needed
STAGING=/dev/shm/gemsmith  # the boot disk is smaller than the weights of a large model
COMMAND=(gemsmith launch worker gs://runs/team/pets-31b --folder /dev/shm/gemsmith/pets-31b --stages 'plan,data,train,export,verify')

# Every host runs this at every boot, also after maintenance: the stages resume from what the bucket has.
set -uo pipefail

metadata() {
    curl --silent --fail --header 'Metadata-Flavor: Google' "http://metadata.google.internal/computeMetadata/v1/instance/$1"
}
worker=$(metadata attributes/agent-worker-number || echo 0)
state=${STATE:-/var/lib/gemsmith}
log=$state/worker-$worker.txt
copier=
mkdir -p "$state"
delete=(gcloud compute tpus queued-resources delete "$NAME" --project "$PROJECT" --zone "$ZONE" --force --quiet --async)

# Whatever ends this script, the first host deletes the node: nothing is left that costs money. But where the machine
# itself goes down, as for maintenance, it boots again and resumes: systemd says so, or has ended this script with TERM.
finish() {
    code=$?
    trap - EXIT TERM
    [ -z "$copier" ] || kill "$copier"
    [ -n "$down" ] || [ "$(systemctl is-system-running)" != stopping ] || down=yes
    echo "gemsmith: ended with $code${down:+, as the machine goes down}" >>"$log"
    gcloud storage cp "$log" "$ROOT/logs/worker-$worker.txt" --quiet
    if [ "$worker" = 0 ] && [ -z "$down" ]; then
        until "${delete[@]}"; do sleep 30; done
    fi
    exit "$code"
}
down=
trap finish EXIT
trap 'down=yes; exit 143' TERM

# The time runs from the first boot; a later one does not prolong it.
[ -s "$state/deadline" ] || echo $(($(date +%s) + TIMEOUT_S)) >"$state/deadline"
left=$(($(cat "$state/deadline") - $(date +%s)))
if [ "$left" -le 0 ]; then
    echo "gemsmith: the time of $TIMEOUT_S s is over" >>"$log"
    exit 124
fi
# A second way to the same end, for when this script is killed.
[ "$worker" != 0 ] || systemd-run --on-active="$((left + 300))" "${delete[@]}"

while sleep 60; do
    gcloud storage cp "$log" "$ROOT/logs/worker-$worker.txt" --quiet
done >/dev/null 2>&1 &
copier=$!

echo always >"${HUGE_PAGES:-/sys/kernel/mm/transparent_hugepage/enabled}" # transfers between host and TPU are faster

if [ -n "$SECRET" ]; then
    HF_TOKEN=$(gcloud secrets versions access latest --secret "$SECRET" --project "$PROJECT") || exit
    export HF_TOKEN
fi

# Artifact Registry asks who pulls; of other registries the image is public.
[[ ! ${IMAGE%%/*} =~ (-docker\.pkg\.dev|gcr\.io)$ ]] || gcloud auth configure-docker "${IMAGE%%/*}" --quiet
for pause in 10 30 90 0; do
    docker pull --quiet "$IMAGE" && break
    sleep "$pause"
done >>"$log" 2>&1

# Privileged and on the host's network, as libtpu and the hosts of a slice need it. TERM reaches the program.
docker rm --force gemsmith >/dev/null 2>&1
timeout --signal=TERM --kill-after=120 "$left" docker run --rm --name gemsmith --privileged --net=host \
    --volume /dev/shm:/dev/shm --env HF_TOKEN --env HF_HOME="$STAGING/hub" --env GEMSMITH_CACHE="$STAGING/cache" \
    "$IMAGE" "${COMMAND[@]}" >>"$log" 2>&1
