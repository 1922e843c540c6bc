"""Compiling in a process of its own. What it compiles is in test_compiled.py; here, how it ends."""

import importlib.util
import sys
from pathlib import Path

import pytest

from gemsmith.errors import MachineError
from gemsmith.plan.aot import compile as child
from gemsmith.plan.aot.compile import Limits, compile_in_child
from gemsmith.recipe.load import build_recipe

RECIPE = build_recipe(
    {
        "checkpoint": "x",
        "model": "tiny-31b",
        "data": {"train": "x", "max_length": 256},
        "train": {"global_batch_size": 4, "mesh": {"fsdp": 4}, "attention": "dense"},
    }
)


@pytest.fixture
def python(monkeypatch, tmp_path):
    """Has the child run these lines instead: `python("import time", "time.sleep(60)")`."""

    def make(*lines: str) -> None:
        file = tmp_path / "python"
        file.write_text("\n".join([f"#!{sys.executable}", *lines]) + "\n")
        file.chmod(0o755)
        monkeypatch.setattr(child.sys, "executable", str(file))

    return make


def test_a_child_that_takes_too_long_is_stopped(python, tmp_path):
    python("import time", "time.sleep(60)")
    with pytest.raises(MachineError, match=r"took more than 0\.01 minutes, and was stopped"):
        compile_in_child(RECIPE, tmp_path, topology="v5p:2x2x1", limits=Limits(seconds=0.6))


def test_a_child_that_holds_too_much_is_stopped(python, tmp_path):
    python("import time", "held = bytearray(200_000_000)", "time.sleep(60)")
    with pytest.raises(MachineError, match=r"compiling held 0\.\d GB of 0\.1 that it may, and was stopped"):
        compile_in_child(RECIPE, tmp_path, topology="v5p:2x2x1", limits=Limits(memory_bytes=1e8, seconds=60))


def test_the_childs_last_line_is_the_error(python, tmp_path):
    python("import sys", "print('noise', file=sys.stderr)", "sys.exit('error: XLA: too large')")
    with pytest.raises(MachineError, match=r"^XLA: too large$"):
        compile_in_child(RECIPE, tmp_path, topology="v5p:2x2x1")


def test_facts_are_what_the_child_wrote_and_it_was_asked_for_the_recipe(python, tmp_path):
    python(
        "import json, pathlib, sys",
        "folder = pathlib.Path(sys.argv[-1])",
        "asked = json.loads((folder / 'request.json').read_text())",
        "(folder / 'step.json').write_text(json.dumps({'rows': asked['recipe']['train']['global_batch_size']}))",
    )
    assert compile_in_child(RECIPE, tmp_path, topology="v5p:2x2x1", options={"a": True}) == {"rows": 4}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_the_error_says_what_to_install(tmp_path):
    with pytest.raises(MachineError, match=r"libtpu is not installed.*pip install --no-deps -r requirements/tpu\.lock"):
        compile_in_child(RECIPE, tmp_path, topology="v5p:2x2x1")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tiny_step_is_compiled_for_four_chips(tmp_path):
    facts = compile_in_child(RECIPE, Path(tmp_path), topology="v5p:2x2x1", limits=Limits(seconds=600))
    assert facts["peak_bytes"] > 0 and len(facts["coordinates"]) == 4
    assert (tmp_path / "step.hlo").read_text().startswith("HloModule")
