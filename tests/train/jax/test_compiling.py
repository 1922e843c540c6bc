"""The compiled step: made before it runs, stopped at once, kept for the next start."""

import signal
import subprocess
import sys

import jax
import pytest

from gemsmith.errors import Terminated
from gemsmith.train.jax import backend as tunix
from gemsmith.train.jax.compile import COMPILER_OPTIONS, compile_program, use_compile_cache
from gemsmith.train.stage import train

STOPPED_WHILE_COMPILING = """
import os, signal, sys, threading, time
from types import SimpleNamespace
from gemsmith import cli
from gemsmith.train.jax import compile as compiling
def compiles():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    time.sleep(600)
    os._exit(9)
thread = threading.Thread
compiling.threading = SimpleNamespace(Thread=lambda **options: thread(**options | {"target": compiles}))
cli.main(["train", sys.argv[1]])
"""


@pytest.mark.slow
def test_sigterm_while_the_step_compiles_ends_the_run_soon(prepared_run):
    run = prepared_run()
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STOPPED_WHILE_COMPILING, str(run.path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 143
    assert ended.stderr.splitlines()[-1].startswith(
        "note: stopped by SIGTERM: no step is saved yet; continue with: gemsmith train"
    )
    assert not run.record_file("train").exists()


@pytest.fixture
def cached_at_once():
    """This step compiles faster than what JAX keeps otherwise."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 0.0)
    yield
    jax.config.update(name, before)


@pytest.mark.slow
def test_a_second_start_takes_its_step_from_the_cache(prepared_run, monkeypatch, cached_at_once, interrupt):
    run = prepared_run(lora={"rank": 3})
    compiled = []

    def compile_and_keep(*given):
        compiled.append(compile_program(*given))
        return compiled[-1]

    monkeypatch.setattr(tunix, "compile_program", compile_and_keep)
    with monkeypatch.context() as patch:
        interrupt(patch, at=3, by=signal.SIGTERM)
        with pytest.raises(Terminated):
            train(run)
    record = train(run)
    assert [step.from_cache for step in compiled] == [False, True]
    assert record.compiled_from_cache and record.compile_s > 0


@pytest.mark.slow
def test_the_recipes_compiler_options_reach_xla(prepared_run, monkeypatch):
    told, lowered = [], jax.stages.Lowered.compile

    def compile_and_tell(program, compiler_options=None, **options):
        if compiler_options is not None:
            told.append(compiler_options)
        return lowered(program, compiler_options, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_tell)
    train(prepared_run(train={"compiler_options": {"xla_cpu_enable_fast_math": False}}))
    assert told == [{**COMPILER_OPTIONS["cpu"], "xla_cpu_enable_fast_math": False}]


@pytest.fixture
def no_cache_folder():
    before = {name: jax.config.values[name] for name in ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_users_cache_unless_another_folder_is_named(no_cache_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GEMSMITH_CACHE", str(tmp_path))
    use_compile_cache()
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "compiled")
    jax.config.update("jax_compilation_cache_dir", "/elsewhere")
    use_compile_cache()
    assert jax.config.values["jax_compilation_cache_dir"] == "/elsewhere"
