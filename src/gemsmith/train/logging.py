"""What training says of its steps: JSON lines, TensorBoard events, a progress bar; and their time against the plan."""

import contextlib
import importlib
import os
import secrets
import statistics
import sys
import textwrap
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import IO, Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from gemsmith.errors import GemsmithError, MachineError, first_line
from gemsmith.hardware import load_catalog, machines_with
from gemsmith.recipe.load import plain_values
from gemsmith.runs.plan_records import MachinePlan, PlanRecord
from gemsmith.runs.records import AgainstPlan, Evaluation, SampleAnswer, TrainRecord, TrainStep
from gemsmith.runs.run import Run, is_up_to_date, read_record
from gemsmith.system.characters import one_line
from gemsmith.system.console import LiteralColumn, open_console, open_progress, print_warnings
from gemsmith.system.files import write_text

_WINDOW_STEPS, _SHOWN_CHARACTERS = 20, 100


class Sink(AbstractContextManager[Any]):
    """Where steps are written or shown. Before the first `add` it leaves everything as it is."""

    @abstractmethod
    def add(self, step: TrainStep) -> None: ...

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Nothing, where steps alone are of interest."""


class StepLog(ExitStack):
    """Every step of the run and every evaluation, in memory and in the sinks; a context manager.

    `earlier` and `evaluations` are those of earlier attempts, which the checkpoint that is continued from holds.
    """

    def __init__(self, earlier: Sequence[TrainStep], sinks: Sequence[Sink], evaluations: Sequence[Evaluation]) -> None:
        super().__init__()
        self.steps, self._sinks, self.evaluations = list(earlier), sinks, list(evaluations)

    def __enter__(self) -> Self:
        for sink in self._sinks:
            self.enter_context(sink)
        return super().__enter__()

    def add(self, step: TrainStep) -> None:
        self.steps.append(step)
        for sink in self._sinks:
            sink.add(step)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        for sink in self._sinks:
            sink.add_evaluation(evaluation)


class StepsFile(Sink):
    """logs/train_steps.jsonl: every step once, since steps of earlier attempts that are done again are dropped."""

    def __init__(self, run: Run, earlier: Sequence[TrainStep]) -> None:
        self._path, self._earlier = run.logs / "train_steps.jsonl", earlier
        self._file: IO[str] | None = None

    def add(self, step: TrainStep) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, "".join(f"{earlier.model_dump_json()}\n" for earlier in self._earlier))
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(step.model_dump_json() + "\n")
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()


class Scalars(Sink):
    """Sends the numbers of each step and evaluation somewhere, under names such as train/loss."""

    @abstractmethod
    def send(self, values: Mapping[str, float], step: int) -> None: ...

    def add(self, step: TrainStep) -> None:
        values = {"loss": step.loss, "grad_norm": step.grad_norm, "learning_rate": step.learning_rate}
        values |= {"real_tokens_per_s": step.real_tokens / step.step_s}
        values |= {} if step.token_accuracy is None else {"token_accuracy": step.token_accuracy}
        self.send({f"train/{name}": value for name, value in values.items()}, step.step)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self.send({"eval/loss": evaluation.loss, "eval/token_accuracy": evaluation.token_accuracy}, evaluation.step)


class Events(Scalars):
    """tensorboard/: those of an earlier attempt that are done again are purged."""

    def __init__(self, run: Run, *, done: int) -> None:
        self._folder, self._done = run.tensorboard, done
        self._writer: Any = None

    def send(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            suffix = f".{self._done:09}"  # a file is named by its second: what goes on within one may not overwrite it
            self._writer = SummaryWriter(str(self._folder), purge_step=self._done + 1, filename_suffix=suffix)
        if not self._writer.file_writer.event_writer._worker.is_alive():
            # A write failed: nobody would take the next ten.
            raise MachineError(f"{self._folder}: cannot be written any more; is its disk full?")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        super().add_evaluation(evaluation)
        for number, answer in enumerate(evaluation.answers, start=1):
            self._writer.add_text(f"eval/answer_{number}", _markdown(answer), evaluation.step)

    def __exit__(self, *_: object) -> None:
        if self._writer is None:
            return
        events = self._writer.file_writer.event_writer
        try:
            self._writer.close()
        except OSError:
            # Python's end would have it close once more, and print both tracebacks.
            if events._worker.is_alive():
                events._worker.stop()
            events._closed = True
            raise


def _markdown(answer: SampleAnswer) -> str:
    return "\n\n".join(f"{name}:\n\n{textwrap.indent(text, '    ')}" for name, text in answer)


class Tracker(Scalars):
    """A run of Weights & Biases, MLflow or Trackio; an attempt that resumes goes on with it, by logs/<tracker>.txt.

    Where it fails once training is under way, that goes on without it, and `warnings` has one more.
    """

    def __init__(self, tracker: str, run: Run, warnings: list[str], *, done: int) -> None:
        self._tracker, self._run, self._file, self._warnings = tracker, run, run.logs / f"{tracker}.txt", warnings
        self._earlier = self._file.read_text(encoding="utf-8").strip() if done and self._file.exists() else None
        self._module: Any = None

    def __enter__(self) -> Self:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                self._module = importlib.import_module(self._tracker)
                self._id = self._open(plain_values(self._run.recipe))
        except Exception as error:  # noqa: BLE001 - a tracker can raise anything
            raise MachineError(
                f"train.report_to: {self._tracker} does not start ({first_line(error)}); mend it, or train without: "
                f"gemsmith train {self._run.path} --set train.report_to=[tensorboard]"
            ) from None
        return self

    def _open(self, config: dict[str, Any]) -> str:
        """What the tracker calls the run that it opens."""
        name = f"{self._run.path.resolve().name}-{secrets.token_hex(3)}"
        if self._tracker == "mlflow":
            self._module.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "gemsmith"))
            started = self._module.start_run(run_id=self._earlier, run_name=None if self._earlier else name)
            if not self._earlier:
                self._module.log_params(config)
            return str(started.info.run_id)
        project, name = os.environ.get(f"{self._tracker.upper()}_PROJECT", "gemsmith"), self._earlier or name
        more = {"id": name, "dir": str(self._run.logs)} if self._tracker == "wandb" else {}
        self._module.init(project=project, name=name, config=config, resume="allow", **more)
        return name

    def send(self, values: Mapping[str, float], step: int) -> None:
        if self._earlier != self._id:
            write_text(self._file, f"{self._id}\n")
            self._earlier = self._id
        name = "log_metrics" if self._tracker == "mlflow" else "log"
        self._call(lambda module: getattr(module, name)(dict(values), step=step), step)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Also a table of the answers; MLflow, whose tables grow where a step is done again, has a text."""
        super().add_evaluation(evaluation)
        answers, step = evaluation.answers, evaluation.step
        if answers and self._tracker == "mlflow":
            text = "\n\n---\n\n".join(map(_markdown, answers))
            self._call(lambda module: module.log_text(text, f"eval/answers_{step:09}.md"), step)
        elif answers:
            table = {"columns": [*SampleAnswer.model_fields], "data": [[text for _, text in one] for one in answers]}
            self._call(lambda module: module.log({"eval/answers": module.Table(**table)}, step=step), step)

    def __exit__(self, *_: object) -> None:
        self._call(lambda module: module.end_run() if self._tracker == "mlflow" else module.finish())

    def _call(self, use: Callable[[Any], object], step: int | None = None) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                if self._module:
                    use(self._module)
        except Exception as error:  # noqa: BLE001 - the training is worth more
            place = "its end" if step is None else f"step {step}"
            told = f"train.report_to: {self._tracker} has nothing from {place} on: {first_line(error)}"
            self._module = None
            self._warnings.append(told)
            print_warnings("train", [told])


def report_sinks(run: Run, warnings: list[str], *, done: int) -> list[Sink]:
    """Where train.report_to sends the numbers; a tracker that fails adds to `warnings`."""
    names = dict.fromkeys(run.recipe.train.report_to)
    return [Events(run, done=done) if one == "tensorboard" else Tracker(one, run, warnings, done=done) for one in names]


class Display(Sink):
    """A bar on a terminal; elsewhere a line every ten seconds. A spike and a skipped step get a line of their own.

    So does, once, what `compare` says of the first twenty timed steps.
    """

    def __init__(self, *, steps: int, done: int, compare: Callable[[Sequence[TrainStep]], str | None]) -> None:
        self._console = open_console(soft_wrap=False)
        self._steps, self._done, self._compare = steps, done, compare
        self._recent: deque[TrainStep] = deque(maxlen=_WINDOW_STEPS)
        self._line_at_s = 0.0
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            line = LiteralColumn("{task.fields[line]}")
            columns = (LiteralColumn("train"), BarColumn(), MofNCompleteColumn(), line, TimeElapsedColumn())
            self._bar = open_progress(self._console, *columns, transient=False)
            self._task = self._bar.add_task("train", total=self._steps, completed=self._done, line="compiling")
            self._bar.start()
        return self

    def add(self, step: TrainStep) -> None:
        first = step.step == self._done + 1
        if not first:  # it warms up, so its time says nothing about the others
            self._recent.append(step)
        if step.step == self._done + 1 + _WINDOW_STEPS and (compared := self._compare(self._recent)):
            self._console.print(f"train  {compared}", soft_wrap=True)
        line = f"loss {step.loss:.4f}"
        if step.spike or step.grad_norm_spike or step.skipped:
            what = f"gradient norm {step.grad_norm:.4g}, a spike" if step.grad_norm_spike else "NaN or infinite"
            what = "a spike" if step.spike else what
            left_out = ", its update is left out" if step.skipped else ""
            self._console.print(f"train  step {step.step}/{self._steps}  {line}: {what}{left_out}", soft_wrap=True)
        if self._recent:
            seconds = sum(recent.step_s for recent in self._recent)
            minutes, left_s = divmod(round((self._steps - step.step) * seconds / len(self._recent)), 60)
            tokens_per_s = sum(recent.real_tokens for recent in self._recent) / seconds
            line += f"  {tokens_per_s:,.0f} real tokens/s  ETA {minutes // 60}:{minutes % 60:02}:{left_s:02}"
        if self._bar:
            self._bar.update(self._task, completed=step.step, line=line)
        elif first or step.step == self._steps or time.monotonic() - self._line_at_s > 10.0:
            self._line_at_s = time.monotonic()
            self._console.print(f"train  step {step.step}/{self._steps}  {line}", soft_wrap=True)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        told = (
            f"train  eval at step {evaluation.step:,} of {self._steps:,}: loss {evaluation.loss:.4f}, accuracy "
            f"{evaluation.token_accuracy:.4f} on {evaluation.loss_tokens:,} tokens"
        )
        self._console.print(told, soft_wrap=True)
        for answer in evaluation.answers:
            asked = one_line(answer.prompt.rpartition("<turn|>")[0] or answer.prompt)
            self._console.print(f"train    asked     …{asked[-_SHOWN_CHARACTERS:]}", soft_wrap=True)
            for name, text in (("answered", answer.answer), ("expected", answer.expected)):
                self._console.print(f"train    {name}  {one_line(text)[:_SHOWN_CHARACTERS]}", soft_wrap=True)

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()


def timed_steps(steps: Sequence[TrainStep], resumed_at: Sequence[int]) -> list[TrainStep]:
    """All but the first of each attempt, which warms up."""
    warming = {1, *(step + 1 for step in resumed_at)}
    return [step for step in steps if step.step not in warming]


def trained_s(train: TrainRecord) -> float:
    """Seconds of training: what is paid for, and the only ones that dollars are made of.

    The last start as a whole, from reading the checkpoint to the record, and the steps that earlier starts had done; at
    least compiling and all steps, which is more where the last start found nothing left to train. No record has what
    earlier starts took beside their steps, nor steps that were lost with them.
    """
    resumed_at = max(train.resumed_at, default=0)
    before = sum(step.step_s for step in train.steps if step.step <= resumed_at)
    before += sum(evaluation.s for evaluation in train.evaluations if evaluation.step <= resumed_at)
    return max(train.provenance.duration_s + before, train.compile_s + sum(step.step_s for step in train.steps))


def machine_of(run: Run, accelerators: Sequence[str]) -> str | None:
    """The machine of the catalog that has these devices, as TrainRecord.machine says it."""
    try:
        catalog = load_catalog(run.recipe.hardware.catalog)
    except GemsmithError:  # gone since the plan: training does not need it
        return None
    found = machines_with(catalog, accelerators, run.recipe.hardware.machines)
    return found[0].name if len(found) == 1 else None


def against_plan(run: Run, trained_on: str | None, steps: Sequence[TrainStep]) -> AgainstPlan | None:
    """What plan.json says of a step on this machine, and what these steps took.

    None without steps, or a plan of this recipe that has the machine.
    """
    machine = _planned(run, trained_on) if steps else None
    if machine is None:
        return None
    seen = statistics.median(step.step_s for step in steps)
    return AgainstPlan(machine=machine.name, planned_step_s=machine.step_s, step_s=seen, steps=len(steps))


def describe_first_step(run: Run, trained_on: str | None) -> str:
    """How long the first step takes, which may be compiled, by plan.json where that has this machine."""
    machine = _planned(run, trained_on)
    low, high = machine.startup_s.get("compile", (0, 0)) if machine else (0, 0)
    how_long = f"{low:.0f} to {high:.0f} s, estimated" if high else "seconds for a tiny model, minutes for a large one"
    return f"train  the first step, which takes longest: {how_long}"


def _planned(run: Run, trained_on: str | None) -> MachinePlan | None:
    """What plan.json says of a machine; None without a plan of this recipe that has it."""
    try:
        machines = read_record(run, PlanRecord).machines if is_up_to_date(run, "plan") else ()
    except GemsmithError:  # of another version, or damaged: training does not need it
        return None
    return next((machine for machine in machines if machine.name == trained_on), None)


def describe(found: AgainstPlan) -> str:
    """The comparison in a line."""
    low, high = found.planned_step_s
    if found.step_s > high:
        verdict = f"{found.step_s / high:.2g} times the most"
    elif found.step_s < low:
        verdict = f"{low / found.step_s:.2g} times faster than the least"
    else:
        verdict = "within it"
    return (
        f"a step takes {found.step_s:.3g} s (median of {found.steps:,}); the plan said {low:.3g} to {high:.3g} s for "
        f"{found.machine}: {verdict}"
    )
