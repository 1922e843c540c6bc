"""The JAX backend: Gemma 4 with Qwix's adapters in Tunix's PeftTrainer, on whatever devices JAX finds.

Every step is a function of the recipe and its number: batch, dropout and learning rate. So a run that was killed
continues from its last complete checkpoint and ends with the bytes of one that never stopped.
"""

import contextlib
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from gemsmith.checkpoint import Checkpoint, open_checkpoint
from gemsmith.checkpoint.saved import has_checksums, is_peft_step, no_checksums
from gemsmith.data import Batch, Batches, load_batches
from gemsmith.errors import DamageError, MachineError, RunError, first_line
from gemsmith.models import Gemma4, base_kinds, load_model
from gemsmith.provenance import Clock, start_clock
from gemsmith.recipe import Recipe
from gemsmith.records import TrainRecord, TrainStep
from gemsmith.run import Run, make_origin, write_record
from gemsmith.train.attempt import (
    checkpoint_metadata,
    damaged_step,
    forget_earlier,
    full_disk,
    is_spike,
    kept_steps,
    preempted,
    refuse_no_targets,
    refuse_to_go_on,
    stop_on_sigterm,
)
from gemsmith.train.falling import risen_notices, unfallen_notices
from gemsmith.train.first_adapter import read_start_adapter, start_adapter_hash
from gemsmith.train.log import Display, Events, StepLog, StepsFile
from gemsmith.train.schedule import learning_rate
from gemsmith.train.spikes import spike_limit
from gemsmith.train.steps import schedule_notices
from gemsmith.train.tunix.compiling import Compiled, compile_step, use_compile_cache
from gemsmith.train.tunix.full_disk import drop_tracebacks_of_a_full_disk, is_full_disk
from gemsmith.train.tunix.hosts import (
    check_accelerator,
    check_hosts,
    is_first_host,
    local_rows,
    place,
    place_batch,
    start_hosts,
)
from gemsmith.train.tunix.lora import add_adapters, count_adapted
from gemsmith.train.tunix.mesh import make_execution, make_mesh, micro_batches_on
from gemsmith.train.tunix.optimizer import make_optimizer
from gemsmith.train.tunix.start import set_adapter
from gemsmith.train.tunix.step import Step, input_shapes, make_step, place_moments
from gemsmith.train.tunix.upstream import Checkpoints, Trainer
from gemsmith.zoo import VARIANTS, Variant, find_variant

_PACKAGES = ("jax", "flax", "qwix", "google-tunix", "optax", "orbax-checkpoint", "numpy")


def train_with_tunix(run: Run, *, fresh: bool = False) -> TrainRecord:
    """The record of a finished training, written to train.json; continues from the last complete checkpoint.

    `fresh`: see gemsmith.train.stage.train. Raises InputError for a mesh or rows that do not fit the machine,
    MachineError where space or memory runs out, EngineError where a loss is one that the recipe stops at, and Preempted
    after SIGTERM, once the last step is saved.
    """
    clock, recipe = start_clock(), run.recipe
    drop_tracebacks_of_a_full_disk()
    use_compile_cache()
    start_hosts()
    check_accelerator()
    batches = load_batches(run)
    variant = find_variant(recipe.model) if recipe.model in VARIANTS else None
    checkpoint = open_checkpoint(recipe.checkpoint, variant=variant)
    mesh = make_mesh(recipe, checkpoint.variant)
    check_hosts(run)
    with _one_line_errors(run):
        model = adapted_model(recipe, checkpoint, mesh)
        session = _Session(run, model, batches, mesh, fresh=fresh)
        with stop_on_sigterm(session.stop):
            session.train()
        record = _make_record(run, clock, session, checkpoint.variant)
    if is_first_host():
        write_record(run, record)
    return record


def adapted_model(recipe: Recipe, checkpoint: Checkpoint, mesh: Mesh) -> Gemma4:
    """The checkpoint's model on the mesh, with adapters at their start: the recipe's, or one that is new."""
    start = read_start_adapter(recipe, checkpoint.variant)
    dtype, quantised = base_kinds(recipe.train.dtype)
    base = load_model(
        checkpoint, dtype=dtype, quantised=quantised, execution=make_execution(recipe, checkpoint.variant, mesh)
    )
    model = add_adapters(base, checkpoint.variant, recipe.lora, seed=recipe.seed)
    if start:
        set_adapter(model, recipe, start)
    return model


class _Session:
    """One attempt at a run: the trainer, its state on the devices, and the log."""

    def __init__(self, run: Run, model: Gemma4, batches: Batches, mesh: Mesh, *, fresh: bool) -> None:
        recipe = run.recipe
        self.run, self.batches, self.mesh, self.model, self.fresh = run, batches, mesh, model, fresh
        self.start_adapter_sha256 = start_adapter_hash(recipe)
        self.stopping, self._told_to_stop = threading.Event(), False
        self.notices: tuple[str, ...] = ()
        self._mark_s, self.compiled = 0.0, Compiled(update=None, seconds=0.0, from_cache=False)
        self.checkpoints = Checkpoints(
            run.checkpoints,
            every=recipe.train.checkpoint_every,
            keep=recipe.train.keep_checkpoints,
            before_save=self._before_save,
            after_save=self._start_clock,
        )
        self.trainer = Trainer(
            model, make_optimizer(recipe.optimizer), place=lambda moments: place_moments(moments, model)
        )
        self.done, kept, self._resumed_at = (0, [], []) if fresh else self._restore()
        self.log = StepLog(kept, self._sinks(kept) if is_first_host() else ())
        self.trainer.start_at(self.done)
        micro_batches = micro_batches_on(recipe, model.variant, mesh)
        self.step: Step = make_step(
            model, self.trainer.optimizer, lora=recipe.lora, seed=recipe.seed, micro_batches=micro_batches
        )
        self.trainer.attach(update=self._update, finish=self._finish, load=self._load, checkpoints=self.checkpoints)
        self.inputs = input_shapes(mesh, rows=recipe.train.rows_per_step, length=recipe.data.max_length)
        self.rows = local_rows(self.inputs["tokens"])
        self.trained, self.moments = self.step.trained, self.step.moments

    def stop(self) -> None:
        """Asks for an end after the step under way; of several hosts all end after the same step."""
        self.stopping.set()

    @property
    def resumed_at(self) -> list[int]:
        """Steps after which the run was continued from a checkpoint."""
        went_on = self.done and len(self.log.steps) > self.done
        return [*self._resumed_at, self.done] if went_on else self._resumed_at

    def train(self) -> None:
        """Trains what is left. Raises Preempted where it was stopped before the end."""
        with self.log:
            try:
                if self._compile():
                    self._start_clock()
                    self.trainer.run()
            finally:
                # Also after Ctrl-C: a save that is still being written would otherwise meet the interpreter's end, or
                # the next start.
                self.checkpoints.wait()
        last = self.trainer.train_steps
        if last < self.batches.steps:
            raise preempted(self.run, last)

    def _compile(self) -> bool:
        """Whether the step is there to be run, or none is left to run; False where SIGTERM came first."""
        if self.done == self.batches.steps:
            return True
        compiled = compile_step(self.step, self.inputs, self.stopping, self.run.recipe.train)
        self.compiled = compiled or self.compiled
        return compiled is not None

    def _sinks(self, kept: list[TrainStep]) -> tuple[StepsFile, Events, Display]:
        return (
            StepsFile(self.run, kept),
            Events(self.run, done=self.done),
            Display(steps=self.batches.steps, done=self.done),
        )

    def _restore(self) -> tuple[int, list[TrainStep], list[int]]:
        """The step to go on after, the steps up to it, and those after which earlier attempts went on."""
        step = self.checkpoints.latest_step()
        if step is None:
            return 0, [], []
        place = f"{self.run.checkpoints}/{step}"
        try:
            metadata = {} if is_peft_step(self.run.checkpoints / str(step)) else self.checkpoints.read_metadata(step)
            if not metadata:
                raise RunError(
                    f"{place}: was not saved by train.backend tunix; set train.checkpoint_folder to another, or start "
                    "again with: "
                    f"gemsmith train {self.run.path} --force"
                )
            steps, resumed_at = (
                kept_steps(self.run, place, metadata, self.start_adapter_sha256),
                list(metadata["resumed_at"]),
            )
            self.checkpoints.maybe_restore(self.model, self.trainer.optimizer, step)
        except (DamageError, ValueError, KeyError, TypeError) as error:
            raise damaged_step(self.run, self.checkpoints.steps(), error, self._is_good) from None
        self.notices = () if has_checksums(metadata) else (no_checksums(place),)
        return step, steps, resumed_at

    def _is_good(self, step: int) -> bool:
        try:
            self.checkpoints.read(step, self.model, self.trainer.optimizer)
        except DamageError:
            return False
        return True

    def _load(self, step: int) -> tuple[int, Batch] | None:
        # Several hosts must stop after the same step, so there the step's own sum over all of them decides.
        told = self._told_to_stop if jax.process_count() > 1 else self.stopping.is_set()
        return None if told or step > self.batches.steps else (step, self.batches.batch(step, self.rows))

    def _update(self, example: tuple[int, Batch]) -> tuple[Any, Any]:
        step, batch = example
        train = self.run.recipe.train
        limit = spike_limit([done.loss for done in self.log.steps], step, train.spike_factor)
        rate = learning_rate(self.run.recipe.optimizer, update=step - 1, updates=self.batches.steps)
        numbers = {
            "learning_rate": rate,
            "step": step,
            "loss_limit": limit if train.on_spike == "skip" else np.inf,
            "stop": self.stopping.is_set(),
        }
        inputs = place_batch(batch, self.rows, self.inputs) | {
            name: place(numbers[name], self.inputs[name]) for name in numbers
        }
        self.trained, self.moments, metrics = self.compiled.update(self.trained, self.moments, self.step.frozen, inputs)
        if self.fresh:
            self._forget_earlier(metrics)
        return metrics, (step, rate, limit, metrics)

    def _forget_earlier(self, metrics: Any) -> None:
        """Deletes what an earlier training left, now that a step has shown that mesh, rows and memory do."""
        jax.block_until_ready(metrics)
        self.checkpoints.delete_all()
        if is_first_host():
            forget_earlier(self.run)
        self.fresh = False

    def _finish(self, pending: Any) -> None:
        """Waits for the step and logs it. Raises EngineError where the recipe stops at such a loss, DataError where
        nothing was trained.
        """
        number, rate, limit, metrics = pending
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        refuse_no_targets(self.run, number, values["targets"])
        now_s = time.monotonic()
        step_s, self._mark_s = now_s - self._mark_s, now_s
        step = TrainStep(
            step=number,
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            learning_rate=rate,
            real_tokens=values["real_tokens"],
            step_s=round(step_s, 6),
            spike=is_spike(values["loss"], limit),
            skipped=values["skipped"],
        )
        refuse_to_go_on(self.run, [*self.log.steps, step], self.run.recipe.train, self.checkpoints.latest_step())
        self._told_to_stop |= bool(values["stop"])
        self.log.add(step)

    def _before_save(self) -> dict[str, Any]:
        self.trainer.finish_steps()
        nnx.update(self.model, self.trained)
        nnx.update(self.trainer.optimizer, self.moments)
        return checkpoint_metadata(self.run, self.log.steps, self.resumed_at, self.start_adapter_sha256)

    def _start_clock(self) -> None:
        self._mark_s = time.monotonic()


@contextlib.contextmanager
def _one_line_errors(run: Run) -> Iterator[None]:
    """Turns what Orbax and XLA raise on a full disk or full memory into one line; anything else passes."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        if is_full_disk(error):
            raise full_disk(run) from None
        text = str(error)
        if "RESOURCE_EXHAUSTED" in text:
            raise MachineError(
                f"out of memory on {jax.devices()[0].device_kind}: {first_line(error)}; lower "
                "train.rows_per_step or "
                "data.max_length, or set train.remat to layer"
            ) from None
        raise


def _make_record(run: Run, clock: Clock, session: _Session, variant: Variant) -> TrainRecord:
    steps, resumes = session.log.steps, session.resumed_at
    warming = {1, *(step + 1 for step in resumes)}
    timed = [step for step in steps if step.step not in warming] or steps
    inside = run.recipe.train.checkpoint_folder is None
    start = session.start_adapter_sha256
    widths = {"sliding_attention": variant.head_dim, "full_attention": variant.global_head_dim}
    origin = make_origin(
        run, "train", clock, packages=_PACKAGES, sources={"train.start_adapter": start} if start else None
    )
    accelerators = tuple(device.device_kind for device in jax.devices() if device.platform != "cpu")
    return TrainRecord(
        origin=origin.model_copy(update={"machine": origin.machine.model_copy(update={"accelerators": accelerators})}),
        backend="tunix",
        model=variant.name,
        steps=tuple(steps),
        warmup_steps=run.recipe.optimizer.warmup(session.batches.steps),
        adapted=count_adapted(session.model, variant),
        trained_parameters=sum(leaf.size for leaf in jax.tree.leaves(session.trained)),
        base_dtype=run.recipe.train.dtype,
        mesh=dict(session.mesh.shape),
        attention={kind: f"{session.model.execution.attention}, head_dim {width}" for kind, width in widths.items()},
        remat=session.model.execution.remat,
        resumed_at=tuple(resumes),
        spikes=tuple(step.step for step in steps if step.spike),
        skipped=tuple(step.step for step in steps if step.skipped),
        hosts=jax.process_count(),
        compile_s=round(session.compiled.seconds, 3),
        compiled_from_cache=session.compiled.from_cache,
        real_tokens_per_s=sum(step.real_tokens for step in timed) / sum(step.step_s for step in timed),
        peak_memory_bytes=peak_memory_bytes(),
        last_checkpoint=f"{'checkpoints' if inside else run.checkpoints}/{session.checkpoints.latest_step()}",
        notices=(
            *session.notices,
            *schedule_notices(run.recipe.optimizer, session.batches.steps),
            *unfallen_notices(steps, run.recipe),
        ),
        grave_notices=risen_notices(steps, run.recipe),
    )


def peak_memory_bytes() -> int:
    """The most that any device held; on CPU, where devices do not say, the most that the process held."""
    held = [stats["peak_bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
    return max(held) if held else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
