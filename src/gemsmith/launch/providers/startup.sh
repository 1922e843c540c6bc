
# Every host runs this at every boot, also after maintenance: the stages go on from what the bucket has.
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
# itself goes down, as for maintenance, it boots again and goes on: systemd says so, or has ended this script with TERM.
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

if [ -n "$SECRET" ]; then
    HF_TOKEN=$(gcloud secrets versions access latest --secret "$SECRET" --project "$PROJECT") || exit
    export HF_TOKEN
fi
