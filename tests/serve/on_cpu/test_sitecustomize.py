"""The module that lets torchvision be imported beside PyTorch for CPUs; test_vllm_images has the real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemsmith.serve.vllm_issues import ON_CPU

TORCH = """
class version: cuda = {cuda!r}
class library:
    class Library:
        def __init__(self, *given): print(*given)
        def define(self, schema): print(schema)
"""


def imported(
    folder: Path, *, cuda: str | None = None, version: str = "0.28.0", code: str = "import torchvision"
) -> str:
    """What a Python prints that imports a stand-in for torchvision, beside one for torch."""
    (folder / "torch.py").write_text(TORCH.format(cuda=cuda))
    (folder / "torchvision.py").write_text("print('imported')")
    (folder / "torchvision-1.dist-info").mkdir()
    (folder / "torchvision-1.dist-info" / "METADATA").write_text(f"Name: torchvision\nVersion: {version}\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([ON_CPU, str(folder)])}
    command = [sys.executable, "-S", "-c", f"import sitecustomize; {code}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_its_operators_are_declared_before_it_is_imported(tmp_path: Path) -> None:
    declared = [f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")]
    assert imported(tmp_path).splitlines() == ["torchvision DEF", *declared, "imported"]


@pytest.mark.parametrize("built", [{"cuda": "13.0"}, {"version": "0.28.0+cpu"}])
def test_one_that_has_them_is_left_alone(built: dict[str, str], tmp_path: Path) -> None:
    assert imported(tmp_path, **built) == "imported\n"


def test_a_process_that_needs_no_torchvision_loads_no_torch(tmp_path: Path) -> None:
    assert imported(tmp_path, code="import json, sys; print('torch' in sys.modules)") == "False\n"
