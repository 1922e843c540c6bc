"""One attempt at training a run: resume, judge each step, log it, record the whole.

It is the same with each backend; what differs, `TrainBackend` asks for. No machine-learning library is imported.
"""

import math
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gemsmith.arch import Variant, lora_targets
from gemsmith.errors import CorruptCheckpointError, DataError, RunError, last_line
from gemsmith.runs.records import Evaluation, Extension, ImageBucket, TrainImages, TrainRecord, TrainSaves, TrainStep
from gemsmith.runs.run import Clock, Run, commit_recipe, make_provenance, write_record
from gemsmith.system.console import open_console, print_warnings
from gemsmith.train import loss_checks, resume
from gemsmith.train.inputs import Answers, start_adapter_hash
from gemsmith.train.logging import (
    Display,
    Sink,
    StepLog,
    StepsFile,
    against_plan,
    describe,
    describe_first_step,
    machine_of,
    report_sinks,
    timed_steps,
)
from gemsmith.train.schedule import describe_extension, learning_rate, schedule_notices


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a step before it runs; of limits the first is the loss's, the second the gradient norm's.

    `skip_above`: where its update is left out.
    """

    step: int
    learning_rate: float
    spike_limits: tuple[float, float]
    skip_above: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step came to, the same in every process."""

    plan: Plan
    loss: float
    grad_norm: float  # before clipping
    real_tokens: int
    targets: int
    correct: int  # targets that have the highest logit
    skipped: bool
    should_stop: bool  # whether any process was told to stop
    images: int = 0  # of the step's rows, over all processes
    soft_tokens: int = 0  # of these
    ended_s: float | None = None  # when, by time.monotonic, where that is not when it is told


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """What a record says of the backend; all but `accelerators` and the last two are fields of TrainRecord."""

    accelerators: tuple[str, ...]
    trained_parameters: int
    mesh: dict[str, int]
    attention: dict[str, str]
    remat: str | tuple[str, ...]
    hosts: int
    peak_memory_bytes: int
    compile_s: float = 0.0
    compiled_from_cache: bool = False
    padding_fraction: float = 0.0  # of the patches that the images of all steps took, the share that is padding
    buckets: tuple[ImageBucket, ...] = ()  # what images were padded to, where that is one of a few sizes


class SavedSteps(Protocol):
    """The steps that a backend has saved."""

    def steps(self) -> list[int]: ...

    def others(self) -> list[int]:
        """Steps there that another backend or program saved: an export would take theirs where they are later."""

    def read_metadata(self, step: int) -> dict[str, Any]:
        """What `TrainSession.metadata` gave when the step was saved, and checksums. Raises CorruptCheckpointError."""

    def delete_all(self) -> None: ...

    def set_aside(self, step: int) -> str:
        """Gives a damaged step another name, which is returned. Every process must ask."""


class TrainBackend(Protocol):
    """What computes the steps, and saves them. Every process that trains calls every method, in the same order."""

    name: str
    packages: tuple[str, ...]  # distributions whose versions the record holds
    writes: bool  # whether this process writes the run directory for all

    @property
    def checkpoints(self) -> SavedSteps: ...

    def prepare(self, session: "TrainSession") -> None:
        """Puts model and optimizer on the devices: at their start, where the session has no step to resume from."""

    def restore(self, step: int) -> None:
        """Gives model and optimizer their values after a saved step. Raises CorruptCheckpointError."""

    def check_saved(self, step: int) -> None:
        """Raises CorruptCheckpointError for a saved step that cannot be restored; asked before `prepare`."""

    def run(self) -> None:
        """Runs the steps after `session.done`, until the last or the session is told to stop.

        Asks `plan` before each, gives its outcome to `finish` in order, and saves steps with `metadata`. After a step,
        also the one resumed after, and before it is saved it evaluates where that is `due`, and tells `evaluated`.
        """

    def facts(self) -> BackendInfo: ...


class TrainSession:
    """One attempt at a run: where it resumes, its log, and what it decides about each step."""

    def __init__(self, run: Run, backend: TrainBackend, *, steps: int, restart: bool) -> None:
        self.run, self.steps, self.restart = run, steps, restart
        self.stopping, self.should_stop = resume.Stop(), False
        self._backend, self._mark_s = backend, 0.0
        self._start_adapter_sha256 = start_adapter_hash(run.recipe)
        self._saves = TrainSaves(number=0, s=0.0, bytes=0)
        self._warnings: list[str] = []
        if backend.writes:
            open_console().print(f"train  loading {run.recipe.checkpoint}")
        self.extensions: list[Extension] = []
        self.done, earlier, evaluations, self._resumed_at = (0, [], [], []) if restart else self._resume()
        backend.prepare(self)
        if self.done:
            backend.restore(self.done)
            if backend.writes:
                open_console().print(f"train  resuming from step {self.done} of {steps}")
                for extension in (each for each in self.extensions if each.after == self.done):
                    open_console().print(f"train  {describe_extension(run.recipe.optimizer, extension)}")
        sinks: tuple[Sink, ...] = ()
        if backend.writes:
            display = Display(steps=steps, done=self.done, compare=self._compare)
            sinks = (StepsFile(run, earlier), *report_sinks(run, self._warnings, done=self.done), display)
        self.log = StepLog(earlier, sinks, evaluations)

    def _compare(self, steps: Sequence[TrainStep]) -> str | None:
        found = against_plan(self.run, machine_of(self.run, self._backend.facts().accelerators), steps)
        return None if found is None else describe(found)

    def _resume(self) -> tuple[int, list[TrainStep], list[Evaluation], list[int]]:
        """The last good step, the steps and evaluations up to it, and those after which attempts resumed.

        Damaged steps after it are set aside. Raises RunError where steps are saved and none is good, or not all are of
        this backend.
        """
        run, backend, damaged = self.run, self._backend, dict[int, str]()
        if others := backend.checkpoints.others():
            raise RunError(
                f"{run.checkpoints}/{others[-1]}: was not saved by train.backend {backend.name}; set "
                f"train.checkpoint_folder to another, or start again with: gemsmith train {run.path} --force"
            )
        for step in sorted(backend.checkpoints.steps(), reverse=True):
            try:
                metadata = backend.checkpoints.read_metadata(step)
                earlier = resume.earlier_steps(run, f"{run.checkpoints}/{step}", metadata, self._start_adapter_sha256)
                evaluations = [Evaluation.model_validate_json(line) for line in metadata.get("evaluations", ())]
                found = step, earlier, evaluations, list(metadata["resumed_at"])
                self.extensions = resume.earlier_extensions(run, metadata)
                backend.check_saved(step)
            except (CorruptCheckpointError, ValueError, KeyError, TypeError) as error:
                damaged[step] = f"{run.checkpoints}/{step}: is damaged ({last_line(error)})"
                continue
            for bad, what in damaged.items():
                aside = backend.checkpoints.set_aside(bad)
                self._warnings.append(f"{what}; it is kept as {aside}, and training goes on from step {step}")
            if backend.writes:
                print_warnings("train", self._warnings)
            return found
        if not damaged:
            return 0, [], [], []
        last = next(iter(damaged.values()))
        raise RunError(f"{last}; no earlier step is good, so start again with: gemsmith train {run.path} --force")

    def train(self) -> None:
        """Trains what is left. Raises Terminated, or after Ctrl-C KeyboardInterrupt, where it ends before the end."""
        try:
            if not self.is_complete:
                if self._backend.writes:
                    machine = machine_of(self.run, self._backend.facts().accelerators)
                    open_console().print(describe_first_step(self.run, machine))
                with self.log:
                    self._backend.run()
        except KeyboardInterrupt:
            raise self.stopped(signal.SIGINT) from None
        if not self.is_complete:
            raise self.stopped(self.stopping.number)
        if self._backend.writes and self.early_stop:
            open_console().print(f"train  {self.early_stop}")
        if self._backend.writes and self.best_step:
            open_console().print(f"train  step {self.best_step:,} has the lowest held-out loss: export takes that one")

    def stopped(self, number: int) -> BaseException:
        return resume.stopped(self.run, number, None if self.restart else self._last_saved())

    @property
    def is_complete(self) -> bool:
        """Whether there is no step left to train; asked where none is under way."""
        return len(self.log.steps) == self.steps or self.early_stop is not None

    # What a backend asks.

    def plan(self, step: int) -> Plan:
        """What a step is run with; it depends on no step but those up to the last but one before it."""
        recipe, train = self.run.recipe, self.run.recipe.train
        limits = (
            loss_checks.spike_limit([done.loss for done in self.log.steps], step, train.spike_factor),
            loss_checks.spike_limit([done.grad_norm for done in self.log.steps], step, train.grad_norm_spike_factor),
        )
        return Plan(
            step=step,
            learning_rate=learning_rate(recipe.optimizer, update=step - 1, updates=self.steps),
            spike_limits=limits,
            skip_above=limits if train.on_spike == "skip" else (math.inf, math.inf),
        )

    def finish(self, outcome: StepOutcome) -> None:
        """Judges and logs a step. Raises EngineError for a loss that the recipe stops at, DataError without targets."""
        run, plan = self.run, outcome.plan
        if not outcome.targets:
            raise DataError(
                f"{run.data}: no token of step {plan.step} is trained on; make the rows again with: gemsmith data "
                f"{run.path} --force"
            )
        if self.restart:
            self.delete_previous_run()
        ended_s = outcome.ended_s or time.monotonic()
        step_s, self._mark_s = ended_s - self._mark_s, ended_s
        step = TrainStep(
            step=plan.step,
            learning_rate=plan.learning_rate,
            loss_tokens=outcome.targets,
            token_accuracy=round(outcome.correct / outcome.targets, 6),
            step_s=round(step_s, 6),
            spike=plan.spike_limits[0] < outcome.loss < math.inf,
            grad_norm_spike=plan.spike_limits[1] < outcome.grad_norm < math.inf,
            **{name: value for name, value in vars(outcome).items() if name in TrainStep.model_fields},
        )
        resume.refuse_to_go_on(run, [*self.log.steps, step], run.recipe.train, self._last_saved())
        self.should_stop |= outcome.should_stop
        self.log.add(step)
        for callback in run.callbacks:
            callback(step)

    def due(self, step: int) -> bool:
        """Whether held-out rows are to be evaluated after the step, the last one run; not where it is told to stop."""
        every = self.run.recipe.train.eval_steps
        if not (every and step) or (self.log.evaluations and self.log.evaluations[-1].step == step):
            return False
        return step == self.steps or (step % every == 0 and not self.should_stop)

    def evaluated(self, step: int, *, begun_s: float, answers: Answers = (), **sums: float) -> None:
        """Logs what the held-out rows came to after a step: sums of nll, correct and targets, and answers to some."""
        count, seconds = sums["targets"], round(time.monotonic() - begun_s, 3)
        numbers = {"loss": sums["nll"] / count, "token_accuracy": round(sums["correct"] / count, 6)}
        self.log.add_evaluation(Evaluation(step=step, **numbers, loss_tokens=int(count), s=seconds, answers=answers))
        self.start_clock()

    @property
    def early_stop(self) -> str | None:
        """Why training ends before its last step, by the evaluations so far; None where it does not."""
        after, train = self.extensions[-1].after if self.extensions else 0, self.run.recipe.train
        return loss_checks.reason_to_end_early(self.log.evaluations, train, after=after, steps=self.steps)

    @property
    def best_step(self) -> int | None:
        """The step of the lowest held-out loss so far, to be saved and kept; None where train.keep is last."""
        is_kept = self.log.evaluations and self.run.recipe.train.keep == "best"
        return loss_checks.best_evaluation(self.log.evaluations).step if is_kept else None

    def delete_previous_run(self) -> None:
        """Deletes what an earlier training left, now that a step has shown that mesh, rows and memory do."""
        self._backend.checkpoints.delete_all()
        if self._backend.writes:
            self.run.record_file("train").unlink(missing_ok=True)
            shutil.rmtree(self.run.tensorboard, ignore_errors=True)
            commit_recipe(self.run)
        self.restart = False

    def metadata(self) -> dict[str, Any]:
        """What a saved step says of itself, beside its arrays."""
        run, log, start = self.run, self.log, self._start_adapter_sha256
        found = resume.checkpoint_metadata(run, log.steps, self.resumed_at, start, log.evaluations, self.extensions)
        return found | {"best_step": self.best_step}

    def saved(self, seconds: float, size_bytes: int) -> None:
        """Counts what training has waited for a save, of 0 bytes none; the next step's time counts from here."""
        found = self._saves
        self._saves = TrainSaves(
            number=found.number + (size_bytes > 0), s=round(found.s + seconds, 3), bytes=found.bytes + size_bytes
        )
        self.start_clock()

    def start_clock(self) -> None:
        """The next step's time counts from here."""
        self._mark_s = time.monotonic()

    # What the record says.

    @property
    def resumed_at(self) -> list[int]:
        """Steps after which the run was continued from a checkpoint."""
        went_on = self.done and len(self.log.steps) > self.done
        return [*self._resumed_at, self.done] if went_on else self._resumed_at

    def record(self, clock: Clock, variant: Variant) -> TrainRecord:
        run, recipe, steps, facts = self.run, self.run.recipe, self.log.steps, self._backend.facts()
        folder = "checkpoints" if recipe.train.checkpoint_folder is None else run.checkpoints
        machine, start = machine_of(run, facts.accelerators), self._start_adapter_sha256
        # Each has an adapter: backends check it as they put them on.
        adapted = () if recipe.train.method == "full" else lora_targets(variant, recipe.lora.targets)
        sources = {"train.init_adapter": start} if start else None
        provenance = make_provenance(run, "train", clock, packages=self._backend.packages, sources=sources)
        devices = provenance.machine.model_copy(update={"accelerators": facts.accelerators})
        return TrainRecord(
            provenance=provenance.model_copy(update={"machine": devices}),
            backend=self._backend.name,
            model=variant.name,
            adapted=Counter(tensor.role for tensor in adapted),
            steps=tuple(steps),
            early_stop=self.early_stop,
            evaluations=tuple(self.log.evaluations),
            warmup_steps=recipe.optimizer.warmup(self.extensions[0].planned_steps if self.extensions else self.steps),
            base_dtype=recipe.train.dtype,
            resumed_at=tuple(self.resumed_at),
            extensions=tuple(self.extensions),
            spikes=tuple(step.step for step in steps if step.spike),
            grad_norm_spikes=tuple(step.step for step in steps if step.grad_norm_spike),
            skipped=tuple(step.step for step in steps if step.skipped),
            machine=machine,
            real_tokens_per_s=_per_s("real_tokens", steps, self.resumed_at),
            images=self._images(facts),
            against_plan=against_plan(run, machine, timed_steps(steps, self.resumed_at)),
            last_checkpoint=f"{folder}/{self.best_step or self._last_saved()}",
            kept=recipe.train.keep,
            saves=self._saves,
            warnings=(
                *self._warnings,
                *schedule_notices(recipe.optimizer, self.steps),
                *loss_checks.loss_plateau_warnings(steps, recipe),
                *loss_checks.grad_norm_warnings(steps, recipe),
            ),
            critical_warnings=loss_checks.loss_increase_warnings(steps, recipe),
            **{name: value for name, value in vars(facts).items() if name in TrainRecord.model_fields},
        )

    def _images(self, facts: BackendInfo) -> TrainImages | None:
        steps = self.log.steps
        if not any(step.images for step in steps):
            return None
        return TrainImages(
            seen=sum(step.images for step in steps),
            soft_tokens=sum(step.soft_tokens for step in steps),
            per_s=_per_s("images", steps, self.resumed_at),
            padding_fraction=facts.padding_fraction,
            buckets=facts.buckets,
        )

    def _last_saved(self) -> int | None:
        return max(self._backend.checkpoints.steps(), default=None)


def train_session(
    run: Run, backend: TrainBackend, *, steps: int, variant: Variant, clock: Clock, restart: bool = False
) -> TrainRecord:
    """The record of a training of so many steps, written to train.json by the process that writes.

    `restart`: see gemsmith.train.stage.train. Raises RunError for saved steps that cannot be resumed from, and once the
    last step is saved Terminated after SIGTERM, KeyboardInterrupt after Ctrl-C.
    """
    session = TrainSession(run, backend, steps=steps, restart=restart)
    with resume.stop_on_signals(session.stopping):
        session.train()
        record = session.record(clock, variant)
        if backend.writes:
            write_record(run, record)
    if session.stopping.is_set():  # training is complete, but another stage may follow
        raise session.stopped(session.stopping.number)
    return record


def _per_s(what: Literal["real_tokens", "images"], steps: Sequence[TrainStep], resumed_at: Sequence[int]) -> float:
    """Of what the steps went through, over the steps but the first of each attempt, which warms up."""
    timed = timed_steps(steps, resumed_at) or steps
    return float(sum(getattr(step, what) for step in timed)) / sum(step.step_s for step in timed)
