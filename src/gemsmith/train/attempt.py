"""What every attempt at a run does alike, whichever backend runs it: how it goes on, what it refuses, how a step is judged, how it ends."""

import contextlib
import json
import math
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gemsmith.errors import DataError, EngineError, Preempted, RunError
from gemsmith.recipe import Train
from gemsmith.records import TrainStep
from gemsmith.run import Run, confirm_recipe, read_record, refused_changes, stage_keys
from gemsmith.train.spikes import reason_to_stop


def checkpoint_metadata(
    run: Run, steps: Sequence[TrainStep], resumed_at: Sequence[int], start_adapter_sha256: str | None
) -> dict[str, Any]:
    """What a checkpoint says about itself beside its arrays; JSON can hold it."""
    return {
        "recipe": stage_keys(run.recipe, "train"),
        "rows_sha256": read_record(run, "data").rows_sha256,
        "start_adapter_sha256": start_adapter_sha256,
        "resumed_at": list(resumed_at),
        "steps": [step.model_dump_json() for step in steps],
    }


def kept_steps(run: Run, place: str, metadata: Mapping[str, Any], start_adapter_sha256: str | None) -> list[TrainStep]:
    """The steps up to a checkpoint. Raises RunError where it was trained with another recipe, rows or start than the run has now."""
    if changes := refused_changes(metadata["recipe"], stage_keys(run.recipe, "train")):
        key, (old, new) = next(iter(changes.items()))
        raise RunError(
            f"{place}: was trained with another recipe: {key} was {json.dumps(old)} and is {json.dumps(new)}; "
            f"set it back, or start again with: gemsmith train {run.path} --force"
        )
    if metadata["rows_sha256"] != read_record(run, "data").rows_sha256:
        raise RunError(f"{place}: was trained on other rows than {run.data} holds; start again with --force")
    if metadata.get("start_adapter_sha256") != start_adapter_sha256:
        raise RunError(f"{place}: was trained from another adapter than train.start_adapter holds now; start again with --force")
    return [TrainStep.model_validate_json(line) for line in metadata["steps"]]


def refuse_no_targets(run: Run, step: int, targets: int) -> None:
    """Raises DataError where a step would train nothing."""
    if not targets:
        raise DataError(f"{run.data}: no token of step {step} is trained on; make the rows again with: gemsmith data {run.path} --force")


def is_spike(loss: float, limit: float) -> bool:
    return limit < loss < math.inf


def refuse_to_go_on(run: Run, steps: Sequence[TrainStep], train: Train, last_saved: int | None) -> None:
    """Raises EngineError where the recipe stops at the last of these steps."""
    reason = reason_to_stop(steps, train)
    if reason is None:
        return
    kept = f"the last checkpoint is {run.checkpoints}/{last_saved}" if last_saved else "there is no checkpoint yet"
    raise EngineError(
        f"training stopped: {reason}; {kept}; lower optimizer.learning_rate, let such steps be skipped, or look at the rows with: "
        "gemsmith data --show 3"
    )


def forget_earlier(run: Run) -> None:
    """Deletes what an earlier training left beside its checkpoints, and puts the recipe of this one in place."""
    run.record_file("train").unlink(missing_ok=True)
    shutil.rmtree(run.tensorboard, ignore_errors=True)
    confirm_recipe(run)


def preempted(run: Run, last: int) -> Preempted:
    """What to raise where SIGTERM ended the attempt after step `last`."""
    saved = f"step {last} is saved" if last else "nothing was trained yet"
    return Preempted(f"stopped by SIGTERM: {saved}; continue with: gemsmith train {run.path}")


@contextlib.contextmanager
def stop_on_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM, which announces a preemption, calls `stop` while the block runs."""
    if threading.current_thread() is not threading.main_thread():  # Python lets only the main thread set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
