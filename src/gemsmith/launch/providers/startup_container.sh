
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
