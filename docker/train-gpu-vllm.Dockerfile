# As train-gpu, beside the vLLM that scores both models in the same job: vLLM's own image, which has the driver's CUDA libraries and every package
# that vLLM was tested with, and Gemsmith in an environment of its own.
FROM vllm/vllm-openai:v0.32.0

# Triton compiles its launchers when a kernel is first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/gemsmith
ENV PATH=/opt/gemsmith/bin:$PATH

WORKDIR /build
COPY requirements/train.lock requirements/gpu.lock requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/train.lock -r requirements/gpu.lock \
    && python -c 'import bitsandbytes, peft, torch, transformers, trl'

COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps . \
    && useradd --create-home --uid 1001 gemsmith
USER 1001
WORKDIR /home/gemsmith
ENV PYTHONUNBUFFERED=1 GEMSMITH_SERVE_PYTHON=/usr/bin/python3
ENTRYPOINT []
CMD ["gemsmith", "--help"]
