"""A run that nothing stopped, what its checkpoints hold, and what processes need that tests start."""

import shutil

import pytest

from gemsmith.run import Run
from gemsmith.train.stage import train


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def whole(prepare, tmp_path_factory):
    """A run of six steps that nothing stopped, and its record. Tests must not change it."""
    run = prepare(tmp_path_factory.mktemp("whole") / "run", train={"backend": "trl"})
    return run, train(run)


def saved_bytes(run, step):
    """Everything that a checkpoint holds but what it says about its attempts."""
    names = ("adapter_model.safetensors", "adapter_config.json", "moments.safetensors")
    return {name: (run.checkpoints / str(step) / name).read_bytes() for name in names}


@pytest.fixture(name="saved_bytes")
def give_saved_bytes():
    return saved_bytes


@pytest.fixture
def trained(whole, tmp_path):
    """A copy of the whole run."""
    shutil.copytree(whole[0].path, tmp_path / "copy")
    return Run(path=tmp_path / "copy", recipe=whole[0].recipe), whole[1]
