#!/usr/bin/env bash
# verilog-31b: plan, data, train, export, verify of gemma4-31b on v5p-8 in us-east5-a; 16.80 USD/h (skypilot-catalog, gcp/vms.csv, commit 006059e0, 2026).
# Estimated: HOURS
# At most 201.60 USD for the machine: 12 h x 1 attempt; bucket, image and network come on top.
NAME=verilog-31b  # of the queued resource and its node
PROJECT=demo-project  # --project
ZONE=us-east5-a  # --zone
ROOT=gs://runs/team/verilog-31b  # --bucket, and the name
UV=0.13.9  # brings the Python and installs into it
PYTHON=3.11  # as in docker/train-tpu.Dockerfile; the node has 3.10
TIMEOUT_S=43200  # --timeout-hours 12
SECRET=''  # the Hugging Face token's in Secret Manager; empty: none is needed
STAGING=/dev/shm/gemsmith  # the boot disk is smaller than the weights of a large model
COMMAND=(gemsmith launch worker gs://runs/team/verilog-31b --folder /dev/shm/gemsmith/verilog-31b --stages 'plan,data,train,export,verify')

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

# The node's own Python is too old: uv brings one, and installs into it what the locks name. A later boot finds it there.
export HOME=${HOME:-/root}
python=$state/python
install() {
    mkdir -p "$state/wheel"
    gcloud storage cp "$ROOT/wheel/*" "$state/wheel/" --quiet || return
    python3 -m pip install --quiet --upgrade --target "$state/uv" "uv==$UV" || return
    "$state/uv/bin/uv" venv --quiet --clear --python "$PYTHON" "$python" || return
    "$state/uv/bin/uv" pip install --quiet --python "$python/bin/python" --no-deps --require-hashes \
        -r "$state/wheel/train.lock" -r "$state/wheel/tpu.lock" -r "$state/wheel/gcs.lock" || return
    "$state/uv/bin/uv" pip install --quiet --python "$python/bin/python" --no-deps --torch-backend cpu \
        -r "$state/wheel/torch.lock" "$state"/wheel/*.whl || return
    touch "$python/.done"
}
for pause in 10 30 90 0; do
    [ -e "$python/.done" ] || install && break
    sleep "$pause"
done >>"$log" 2>&1
[ -e "$python/.done" ] || exit 1

export PATH="$python/bin:$PATH" PYTHONUNBUFFERED=1 HF_HOME="$STAGING/hub" GEMSMITH_CACHE="$STAGING/cache"
timeout --signal=TERM --kill-after=120 "$left" "${COMMAND[@]}" >>"$log" 2>&1
