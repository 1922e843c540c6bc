"""Shared by all tests: tiny checkpoints, made once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gemsmith.checkpoint.tiny import make_checkpoint
from gemsmith.zoo import find_variant


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns the folder of a random tiny checkpoint: `tiny_checkpoint("tiny-e2b", "float32")`. Tests must not write into it."""
    made: dict[tuple[str, str], Path] = {}

    def make(variant: str, dtype: str = "float32") -> Path:
        if (variant, dtype) not in made:
            folder = tmp_path_factory.mktemp("checkpoints") / f"{variant}-{dtype}"
            made[variant, dtype] = make_checkpoint(find_variant(variant), folder, dtype=dtype)
        return made[variant, dtype]

    return make
