# Training in JAX on a TPU VM or GKE: docker run --privileged --net=host, with the host's /dev/shm.
# Runs as root: libtpu opens /dev/accel* and /dev/vfio, which only root may on a TPU VM.
# Layers are in the order in which they change: locked packages, Gemsmith.
FROM python:3.11.13-slim-bookworm

# verify compares with PyTorch on the host's processor. Where there is an index of its wheels for processors, name it with
# --build-arg PIP_EXTRA_INDEX_URL; the usual wheel brings several GB of CUDA, which is of no use here.
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /build
COPY requirements/train.lock requirements/tpu.lock requirements/gcs.lock requirements/torch.lock requirements/gpu.lock requirements/
# The locks name every package: pip must not look for others, since google-tunix and transformers ask for different versions of safetensors.
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/train.lock -r requirements/tpu.lock -r requirements/gcs.lock \
    && pip install --no-cache-dir --no-deps -r requirements/torch.lock \
    && { python -c 'import torch' || pip install --no-cache-dir --no-deps --require-hashes -r requirements/gpu.lock; } \
    && python -c 'import gcsfs, jax, peft, torch, transformers'

COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps .

WORKDIR /root
ENV PYTHONUNBUFFERED=1
CMD ["gemsmith", "--help"]
