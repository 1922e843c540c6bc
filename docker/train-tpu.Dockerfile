# Training in JAX on a TPU VM or GKE: docker run --privileged --net=host, with the host's /dev/shm.
# Runs as root: libtpu opens /dev/accel* and /dev/vfio, which only root may on a TPU VM.
# Layers are in the order in which they change: locked packages, Gemsmith.
FROM python:3.11.13-slim-bookworm

# verify compares with PyTorch on the host's processor. The usual wheel of torch brings CUDA, which is of no use here: where there is
# an index of wheels for processors, name it with --build-arg PIP_EXTRA_INDEX_URL.
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /build
COPY requirements/train.lock requirements/tpu.lock requirements/
COPY pyproject.toml README.md LICENSE ./
COPY src/gemsmith/__init__.py src/gemsmith/__init__.py
RUN pip install --no-cache-dir --constraint requirements/train.lock --constraint requirements/tpu.lock \
    '.[tpu,verify,report]' gcsfs==2026.10.1

COPY src src
RUN pip install --no-cache-dir --no-deps --force-reinstall .

WORKDIR /root
ENV PYTHONUNBUFFERED=1
CMD ["gemsmith", "--help"]
