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
COPY requirements/train.lock requirements/train.lock
COPY pyproject.toml README.md LICENSE ./
COPY src/gemsmith/__init__.py src/gemsmith/system/version.py src/gemsmith/
RUN pip install --no-cache-dir --constraint requirements/train.lock '.[trl,verify,serve,report]' bitsandbytes==0.49.2

COPY src src
RUN pip install --no-cache-dir --no-deps --force-reinstall . \
    && useradd --create-home --uid 1001 gemsmith
USER 1001
WORKDIR /home/gemsmith
ENV PYTHONUNBUFFERED=1 GEMSMITH_SERVE_PYTHON=/usr/bin/python3
ENTRYPOINT []
CMD ["gemsmith", "--help"]
