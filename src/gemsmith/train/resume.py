"""What an attempt at a run saves beside the arrays, what it refuses to resume from, and how a signal ends it."""

import atexit
import contextlib
import hashlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from gemsmith.checkpoints.folder import open_checkpoint, refuse_nonfinite_base
from gemsmith.errors import EngineError, MachineError, RunError, Terminated
from gemsmith.recipe.keys import PATHS
from gemsmith.recipe.schema import Train
from gemsmith.runs.records import DataRecord, Evaluation, Extension, TrainStep
from gemsmith.runs.run import Run, incompatible_changes, read_record, stage_keys
from gemsmith.system.console import open_console
from gemsmith.system.signals import STOPS, handling, leave, listening
from gemsmith.train.loss_checks import reason_to_stop
from gemsmith.train.schedule import learning_rate

# Python hears Ctrl-C between two of its own steps, so at once unless it waits for a device.
_UNHEARD_S, _TRIES = 2.0, 8
_AT_ONCE_S = 0.2


def check_consistency(
    run: Run, gather: Callable[[bytes], Sequence[bytes]], same: Mapping[str, Any], *, kinds: tuple[str, str]
) -> None:
    """Raises RunError unless all processes that train together have the same recipe, rows, and what else is named.

    `gather` gives, in order, what each process called it with; `kinds`: what one of them is called, and several.
    """
    keys = {name: value for name, value in stage_keys(run.recipe, "train").items() if name not in PATHS}
    rows = {"rows": read_record(run, DataRecord).rows_sha256, "held-out rows": _eval_rows_sha256(run)}
    for name, value in {"recipe": keys, **rows, **same}.items():
        digests = gather(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest())
        number = next((number for number, other in enumerate(digests) if other != digests[0]), None)
        if number is not None:
            kind, plural = kinds
            raise RunError(
                f"{run.path}: {kind} {number} of {len(digests)} has {'' if name.endswith('s') else 'a '}different "
                f"{name} from {kind} 0; use the same {name} on all {plural}"
            )


def checkpoint_metadata(
    run: Run,
    steps: Sequence[TrainStep],
    resumed_at: Sequence[int],
    start_adapter_sha256: str | None,
    evaluations: Sequence[Evaluation] = (),
    extensions: Sequence[Extension] = (),
) -> dict[str, Any]:
    """What a checkpoint says about itself beside its arrays; JSON can hold it."""
    data = read_record(run, DataRecord)
    return {
        "recipe": stage_keys(run.recipe, "train"),
        "rows_sha256": data.rows_sha256,
        "base_sha256": data.provenance.inputs_sha256.get("checkpoint"),
        "planned_steps": data.steps,
        "extensions": [extension.model_dump() for extension in extensions],
        "start_adapter_sha256": start_adapter_sha256,
        "resumed_at": list(resumed_at),
        "steps": [step.model_dump_json() for step in steps],
        "eval_rows_sha256": _eval_rows_sha256(run),
        "evaluations": [evaluation.model_dump_json() for evaluation in evaluations],
    }


def _eval_rows_sha256(run: Run) -> str | None:
    rows = read_record(run, DataRecord).eval_rows
    return rows.rows_sha256 if rows else None


def earlier_extensions(run: Run, metadata: Mapping[str, Any]) -> list[Extension]:
    """Those up to a checkpoint, and with its last step one more where the run has other steps planned by now."""
    steps = read_record(run, DataRecord).steps
    found = [Extension.model_validate(each) for each in metadata.get("extensions", ())]
    if (planned := metadata.get("planned_steps", steps)) != steps:
        found.append(Extension(after=len(metadata["steps"]), planned_steps=planned, steps=steps))
    return found


def earlier_steps(run: Run, place: str, metadata: dict[str, Any], start_adapter_sha256: str | None) -> list[TrainStep]:
    """The steps of earlier attempts up to a checkpoint.

    Raises RunError where it was trained with another recipe, base, rows, start or learning rates than the run has now.
    """
    if changes := incompatible_changes(metadata["recipe"], stage_keys(run.recipe, "train")):
        key, (old, new) = next(iter(changes.items()))
        raise RunError(
            f"{place}: was trained with another recipe: {key} was {json.dumps(old)} and is {json.dumps(new)}; "
            f"set it back, or start again with: gemsmith train {run.path} --force"
        )
    data = read_record(run, DataRecord)
    again, than = f"back and run: gemsmith data {run.path} --force;", f"than {run.data} holds; put those"
    another = "was trained from another adapter than train.init_adapter holds now; put that one back,"
    base = data.provenance.inputs_sha256.get("checkpoint")
    checked = {
        "base_sha256": (base, f"was trained from other weights than {run.recipe.checkpoint} has; put those {again}"),
        "rows_sha256": (data.rows_sha256, f"was trained on other rows {than} of data.train {again}"),
        "eval_rows_sha256": (_eval_rows_sha256(run), f"was evaluated on other rows of data.eval {than} {again}"),
        "start_adapter_sha256": (start_adapter_sha256, another),
    }
    wrong = [what for name, (now, what) in checked.items() if ({"base_sha256": base} | metadata).get(name) != now]
    if (done := len(metadata["steps"])) > data.steps:
        wrong.append(f"is step {done:,} of what is now {data.steps:,}; set train.max_steps or train.epochs back,")
    if wrong:
        raise RunError(f"{place}: {wrong[0]} or start again with: gemsmith train {run.path} --force")
    steps = [TrainStep.model_validate_json(line) for line in metadata["steps"]]
    optimizer, extensions = run.recipe.optimizer, earlier_extensions(run, metadata)
    for step in steps:
        planned = (each.planned_steps for each in extensions if step.step <= each.after)
        rate = learning_rate(optimizer, update=step.step - 1, updates=next(planned, data.steps))
        if not math.isclose(step.learning_rate, rate, rel_tol=1e-6):
            raise RunError(
                f"{place}: was trained with another schedule: step {step.step} had the learning rate "
                f"{step.learning_rate:g}, with a warm-up of {optimizer.warmup(data.steps)} steps it has {rate:g}; set "
                f"warm-up back, or start again with: gemsmith train {run.path} --force"
            )
    return steps


def refuse_to_go_on(run: Run, steps: Sequence[TrainStep], train: Train, last_saved: int | None) -> None:
    """Raises EngineError where the recipe stops at the last step, CheckpointError where the base is damaged."""
    reason = reason_to_stop(steps, train)
    if reason is None:
        return
    nonfinite = not (math.isfinite(steps[-1].loss) and math.isfinite(steps[-1].grad_norm))
    if nonfinite:
        consequence = (
            f"training stopped at step {steps[-1].step} with loss {steps[-1].loss}; copy the checkpoint again, and "
            f"run: gemsmith data {run.path} --force, then: gemsmith train {run.path}"
        )
        refuse_nonfinite_base(open_checkpoint(run.recipe.checkpoint), consequence=consequence)
    kept = f"the last checkpoint is {run.checkpoints}/{last_saved}" if last_saved else "there is no checkpoint yet"
    ways = ["lower optimizer.learning_rate", "let such steps be skipped"]
    if nonfinite and all(step.skipped for step in steps[:-1]):  # no update came before
        ways = ["set train.dtype to float32"] * (train.dtype != "float32")
        ways += ["name another train.init_adapter"] * bool(train.init_adapter)
    raise EngineError(
        f"training stopped: {reason}; {kept}; {', '.join([*ways, ''])}{'or ' if ways else ''}look at the rows with: "
        f"gemsmith data {run.path} --show 3"
    )


def full_disk(run: Run) -> MachineError:
    """What to raise where the disk has become full; steps that were saved before are whole."""
    folder = run.recipe.train.checkpoint_folder
    path = run.path if folder is None else f"{run.path} or {folder} (train.checkpoint_folder)"
    return MachineError(f"no space left on device while writing under {path}; free some and run the same command again")


def stopped(run: Run, number: int, last: int | None) -> BaseException:
    """What to raise where SIGTERM or Ctrl-C, a signal's `number`, ended the attempt; `last`: the last saved step."""
    kind, by = (KeyboardInterrupt, "Ctrl-C") if number == signal.SIGINT else (Terminated, "SIGTERM")
    saved = f"step {last} is saved" if last else "no step is saved yet"
    return kind(f"stopped by {by}: {saved}; continue with: gemsmith train {run.path}")


class Stop(threading.Event):
    """Set where an attempt is to end once the step under way is saved."""

    number = signal.SIGTERM  # the signal that asked for it
    asked_s = math.inf

    def is_insisted_on(self, number: int) -> bool:
        """Whether a signal is a second Ctrl-C. Of one, `timeout` and programs that hand it on make two at once."""
        return number == signal.SIGINT and time.monotonic() - self.asked_s > _AT_ONCE_S

    def ask(self, number: int) -> None:
        """Sets it, and says on stderr what becomes of Ctrl-C."""
        if number == signal.SIGINT:
            if self.is_set():
                return
            open_console().print(
                "train  stops, and saves the step under way if there is one; Ctrl-C again ends it at once"
            )
        self.number, self.asked_s = signal.Signals(number), time.monotonic()
        self.set()


@contextlib.contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """SIGTERM, which announces a preemption, and the first Ctrl-C set `stop` while the block runs.

    The second Ctrl-C raises KeyboardInterrupt. Where that is not heard, as within a long step, the process ends.
    """
    again, heard, ended = threading.Event(), threading.Event(), threading.Event()

    def on_response(number: int) -> None:
        if number not in STOPS or again.is_set():
            return
        if not stop.is_insisted_on(number):
            stop.ask(number)
            return
        again.set()
        atexit.register(leave, 130)  # the interpreter's end would wait for the step
        for _ in range(_TRIES):
            # The handler below may have been called before `again` was set; one that comes just before the main thread
            # sleeps does not wake it.
            if not heard.is_set():
                os.kill(os.getpid(), number)
            if ended.wait(_UNHEARD_S / _TRIES):
                return
        console = open_console()
        console.show_cursor()
        console.print("note: stopped by Ctrl-C; the same command resumes from the last saved step")
        leave(130)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if again.is_set() and not heard.is_set():
            heard.set()  # the one that `on_response` sends would interrupt whoever handles this one
            raise KeyboardInterrupt

    with listening(on_response), handling(dict.fromkeys(STOPS, interrupt)):
        try:
            yield
        finally:
            ended.set()
