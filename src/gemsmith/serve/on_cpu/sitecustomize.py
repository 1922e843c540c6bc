"""Lets torchvision be imported beside a PyTorch without CUDA, in vLLM's process and in those that it starts.

PyPI's torchvision is built for CUDA. Its compiled part does not load beside PyTorch for CPUs, and its Python part then
fails at the import, since it describes two operators of that part, `nms` and `qnms`. Gemma 4 only resizes with
torchvision, which is PyTorch's own code: so the two operators are declared, and never called.

Standard library only, and read by another Python than Gemsmith's.
"""

import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

OPERATORS = ("nms", "qnms")
_kept: list[Any] = []  # an operator is gone with the library that declared it


class _BeforeTorchvision(MetaPathFinder):
    """Finds no module, and declares the operators when torchvision is first looked for."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        del path, target
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            torch = import_module("torch")
            # A torchvision that was built for CPUs says so in its version, and has the operators itself.
            if torch.version.cuda is None and not metadata.version("torchvision").endswith("+cpu"):
                library = torch.library.Library("torchvision", "DEF")
                for name in OPERATORS:
                    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                _kept.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
