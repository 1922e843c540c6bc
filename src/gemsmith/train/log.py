"""What a training run says while it runs: one JSON line a step, TensorBoard events, a progress bar. No machine-learning library."""

import json
import os
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gemsmith.errors import RunError
from gemsmith.records import TrainStep
from gemsmith.run import Run, write_text

_WINDOW_STEPS = 20
_LINE_EVERY_S = 10.0


def steps_file(run: Run) -> Path:
    return run.logs / "train_steps.jsonl"


def resumes_file(run: Run) -> Path:
    return run.logs / "train_resumes.jsonl"


def read_steps(run: Run) -> list[TrainStep]:
    """The steps in the log, in order; a last line that a kill cut short is left out."""
    try:
        lines = steps_file(run).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    steps = []
    for line in lines:
        try:
            steps.append(TrainStep.model_validate_json(line))
        except ValidationError:
            break
    return steps


def read_resumes(run: Run) -> list[int]:
    """Steps after which the run was continued from a checkpoint."""
    file = resumes_file(run)
    return [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


class StepLog:
    """Writes each step to logs/train_steps.jsonl, to TensorBoard and to the terminal; a context manager.

    Of an earlier attempt it keeps the steps up to `done`, which a checkpoint holds, so that every step appears once.
    """

    def __init__(self, run: Run, *, steps: int, done: int) -> None:
        from tensorboardX import SummaryWriter

        kept = read_steps(run)[:done]
        if [step.step for step in kept] != list(range(1, done + 1)):
            raise RunError(f"{steps_file(run)}: lacks steps before {done}, which checkpoints/ holds; delete checkpoints/ to start again")
        run.logs.mkdir(parents=True, exist_ok=True)
        write_text(steps_file(run), "".join(f"{step.model_dump_json()}\n" for step in kept))
        if done:
            with resumes_file(run).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": done}) + "\n")
        else:
            resumes_file(run).unlink(missing_ok=True)
        self._file = steps_file(run).open("a", encoding="utf-8")
        self._events = SummaryWriter(str(run.tensorboard), purge_step=done + 1)
        self._display = _Display(steps=steps, done=done)

    def add(self, step: TrainStep) -> None:
        self._file.write(step.model_dump_json() + "\n")
        self._file.flush()
        values = {"loss": step.loss, "grad_norm": step.grad_norm, "learning_rate": step.learning_rate}
        for name, value in (values | {"real_tokens_per_s": step.real_tokens / step.step_s}).items():
            self._events.add_scalar(f"train/{name}", value, step.step)
        self._display.show(step)

    def sync(self) -> None:
        """Puts the lines on disk, before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._display.stop()
        self._events.close()
        self._file.close()


class _Display:
    """A bar on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, *, steps: int, done: int) -> None:
        self._console = Console(stderr=True)
        self._steps, self._done = steps, done
        self._recent: deque[TrainStep] = deque(maxlen=_WINDOW_STEPS)
        self._line_at_s = 0.0
        self._bar: Progress | None = None
        self._task: Any = None

    def start(self) -> None:
        if not self._console.is_terminal:
            return
        columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[line]}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task("train", total=self._steps, completed=self._done, line="compiling")
        self._bar.start()

    def show(self, step: TrainStep) -> None:
        first = step.step == self._done + 1
        if not first:  # it compiled, so its time says nothing about the others
            self._recent.append(step)
        line = f"loss {step.loss:.4f}"
        if self._recent:
            seconds = sum(recent.step_s for recent in self._recent)
            left_s = (self._steps - step.step) * seconds / len(self._recent)
            line += f"  {sum(recent.real_tokens for recent in self._recent) / seconds:,.0f} real tokens/s  ETA {_duration(left_s)}"
        if self._bar:
            self._bar.update(self._task, completed=step.step, line=line)
        elif first or step.step == self._steps or time.monotonic() - self._line_at_s > _LINE_EVERY_S:
            self._line_at_s = time.monotonic()
            self._console.print(f"train  step {step.step}/{self._steps}  {line}", highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self._bar:
            self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
