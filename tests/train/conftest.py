"""Runs whose data stage has ended: a base of two layers, so that a step compiles in seconds, and a few packed rows."""

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from gemsmith.data.stage import prepare_data
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.records import TrainRecord, TrainStep
from gemsmith.runs.run import Run, find_run, open_run, read_record
from gemsmith.train.stage import train
from support.made import made_once, shared_folder


def make_recipe(checkpoint: Path, /, **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "data": {"train": {"task": "verilog", "rows": 12}, "max_length": 256},
        "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "train": {"max_steps": 6, "global_batch_size": 2, "dtype": "float32", "remat": "none", "save_steps": 2},
    }
    for name, keys in sections.items():
        values[name] = values[name] | keys if isinstance(values.get(name), dict) else keys
    return build_recipe(values)


@pytest.fixture(scope="session")
def prepare(small_checkpoint: Path) -> Callable[..., Run]:
    """Returns a run that can be trained: `prepare(folder, train={"max_steps": 4})`."""

    def make(folder: Path, **sections: Any) -> Run:
        run = open_run(folder, make_recipe(small_checkpoint, **sections))
        prepare_data(run)
        return run

    return make


@pytest.fixture(scope="session")
def trained_once(prepare, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Run, TrainRecord]]:
    """Returns a run that was trained once for all tests, and its record: `trained_once("whole", train={...})`. Tests
    must not change it."""

    def make(name: str, **sections: Any) -> tuple[Run, TrainRecord]:
        folder = made_once(
            shared_folder(tmp_path_factory) / "trained" / name, lambda run: train(prepare(run, **sections))
        )
        run = Run(path=folder, recipe=find_run(folder))
        return run, read_record(run, TrainRecord)

    return make


@pytest.fixture
def prepared_run(prepare: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """`prepare` in the test's own folder: `prepared_run(train={"max_steps": 4})`."""
    return partial(prepare, tmp_path / "run")


@pytest.fixture
def small_recipe(small_checkpoint: Path) -> Callable[..., Recipe]:
    """Returns the recipe of the base of two layers: `small_recipe(lora={"dropout": 0.0})`."""
    return partial(make_recipe, small_checkpoint)


@pytest.fixture
def read_steps() -> Callable[[Run], list[TrainStep]]:
    """Returns the steps in a run's log: `read_steps(run)`."""

    def read(run: Run) -> list[TrainStep]:
        lines = (run.logs / "train_steps.jsonl").read_text().splitlines()
        return [TrainStep.model_validate_json(line) for line in lines if line.endswith("}")]

    return read


@pytest.fixture
def read_events() -> Callable[[Run], dict[str, dict[int, float]]]:
    """Returns TensorBoard's scalars, tag -> step -> value, as TensorBoard shows them: a start purges later steps."""

    def read(run: Run) -> dict[str, dict[int, float]]:
        events: dict[str, dict[int, float]] = {}
        for file in sorted(run.tensorboard.iterdir()):
            data, place = file.read_bytes(), 0
            while place < len(data):
                (size,) = struct.unpack_from("<Q", data, place)
                event = Event.FromString(data[place + 12 : place + 12 + size])
                place += 16 + size
                if event.session_log.status == event.session_log.START:
                    events = {
                        tag: {step: value for step, value in steps.items() if step < event.step}
                        for tag, steps in events.items()
                    }
                for value in event.summary.value:
                    assert event.step not in events.setdefault(value.tag, {}), "an event appears twice"
                    events[value.tag][event.step] = value.simple_value
        return events

    return read


@pytest.fixture
def same_numbers() -> Callable[[TrainRecord, TrainRecord], bool]:
    """Returns whether two records have the same steps, but for their times: `same_numbers(record, other)`."""
    names = ("step", "loss", "grad_norm", "learning_rate", "real_tokens")

    def same(record: TrainRecord, other: TrainRecord) -> bool:
        return [[getattr(step, name) for name in names] for step in record.steps] == [
            [getattr(step, name) for name in names] for step in other.steps
        ]

    return same


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, bytes]]:
    """Returns the bytes of every file in a folder but of hidden ones: `snapshot(run.path)`."""

    def read(folder: Path) -> dict[str, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    return read
