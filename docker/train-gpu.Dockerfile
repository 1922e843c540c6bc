# Training with TRL on one host's GPUs, Hopper (sm_90) and Blackwell (sm_120): PyTorch's wheels have both, and CUDA 13.0 with them, so
# the host needs only a driver of 580 or newer, as Cloud Run has.
# Layers are in the order in which they change: system, locked packages, Gemsmith.
FROM python:3.11.13-slim-bookworm

# Triton compiles its launchers when a kernel is first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# The locks name every package, those of CUDA too, and the hash of each.
WORKDIR /build
COPY requirements/train.lock requirements/gpu.lock requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/train.lock -r requirements/gpu.lock \
    && python -c 'import bitsandbytes, peft, torch, transformers, trl'

COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps . \
    && useradd --create-home --uid 1000 gemsmith
USER 1000
WORKDIR /home/gemsmith
ENV PYTHONUNBUFFERED=1
CMD ["gemsmith", "--help"]
