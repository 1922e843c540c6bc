
# The node's own Python is too old: uv brings one, and installs into it what the locks name. A later boot finds it there.
export HOME=${HOME:-/root}
python=$state/python
install() {
    mkdir -p "$state/wheel"
    gcloud storage cp "$ROOT/python/*" "$state/wheel/" --quiet || return
    python3 -m pip install --quiet --upgrade --target "$state/uv" "uv==$UV" || return
    "$state/uv/bin/uv" venv --quiet --clear --python "$PYTHON" "$python" || return
    "$state/uv/bin/uv" pip install --quiet --python "$python/bin/python" --no-deps --torch-backend cpu \
        -r "$state/wheel/train.lock" -r "$state/wheel/tpu.lock" -r "$state/wheel/gcs.lock" "$state"/wheel/*.whl || return
    touch "$python/.done"
}
for pause in 10 30 90 0; do
    [ -e "$python/.done" ] || install && break
    sleep "$pause"
done >>"$log" 2>&1
[ -e "$python/.done" ] || exit 1

export PATH="$python/bin:$PATH" PYTHONUNBUFFERED=1 HF_HOME="$STAGING/hub" GEMSMITH_CACHE="$STAGING/cache"
timeout --signal=TERM --kill-after=120 "$left" "${COMMAND[@]}" >>"$log" 2>&1
