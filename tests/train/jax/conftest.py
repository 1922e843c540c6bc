"""A run that nothing stopped, what its checkpoints hold, and runs that something stops."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from gemsmith.data.batches import Batches
from gemsmith.runs.run import Run


@pytest.fixture
def interrupt() -> Callable[..., None]:
    def interrupt(monkeypatch: pytest.MonkeyPatch, *, at: int, by: signal.Signals | type[BaseException]) -> None:
        """Lets the batch of step `at` raise an error or send a signal."""
        batch = Batches.batch

        def interrupted(self, step, rows):
            if step == at:
                if isinstance(by, signal.Signals):
                    signal.raise_signal(by)
                else:
                    raise by
            return batch(self, step, rows)

        monkeypatch.setattr(Batches, "batch", interrupted)

    return interrupt


@pytest.fixture(scope="session")
def whole(trained_once):
    """A run of six steps that nothing stopped, and its record. Tests must not change it."""
    return trained_once("tunix")


@pytest.fixture
def trained(whole, tmp_path):
    """A copy of it."""
    shutil.copytree(whole[0].path, tmp_path / "copy")
    return Run(path=tmp_path / "copy", recipe=whole[0].recipe), whole[1]


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """What a plain PyTreeCheckpointer finds in a folder of Orbax, with no model:
    "layers/0/mlp/up_proj/kernel_lora_a/value" -> array."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.PyTreeCheckpointer()
    as_numpy = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), checkpointer.metadata(folder).item_metadata.tree
    )
    leaves = jax.tree_util.tree_flatten_with_path(checkpointer.restore(folder, restore_args=as_numpy))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.fixture(name="read_arrays")
def give_read_arrays():
    return read_arrays


def saved_bytes(run: Run, step: int) -> dict[str, bytes]:
    """Everything that a checkpoint holds."""
    items = ("model_params", "optimizer_state")
    return {
        f"{item}/{name}": array.tobytes()
        for item in items
        for name, array in read_arrays(run.checkpoints / str(step) / item).items()
    }


@pytest.fixture(name="saved_bytes")
def give_saved_bytes():
    return saved_bytes
