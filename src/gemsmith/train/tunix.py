"""The JAX backend: Gemma 4 with Qwix's adapters in Tunix's PeftTrainer, on whatever devices JAX finds.

Every step is a function of the recipe and its number: batch, dropout and learning rate. So a run that was killed continues from
its last complete checkpoint and ends with the bytes of one that never stopped.
"""

import contextlib
import math
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from gemsmith.checkpoint import Checkpoint, open_checkpoint
from gemsmith.data import Batch, Batches, load_batches
from gemsmith.errors import DataError, EngineError, MachineError, Preempted, RecipeError, RunError
from gemsmith.models import Gemma4, load_model
from gemsmith.recipe import Recipe
from gemsmith.records import TrainRecord, TrainStep
from gemsmith.run import Clock, Run, make_origin, start_clock, write_record
from gemsmith.train.log import StepLog, read_resumes, read_steps
from gemsmith.train.lora import add_adapters, count_adapted
from gemsmith.train.optimizer import make_optimizer
from gemsmith.train.schedule import learning_rate
from gemsmith.train.step import Step, input_shapes, make_step, place_moments
from gemsmith.train.upstream import Checkpoints, Trainer
from gemsmith.zoo import Variant, find_variant

_PACKAGES = ("jax", "flax", "qwix", "google-tunix", "optax", "orbax-checkpoint", "numpy")


def train_with_tunix(run: Run) -> TrainRecord:
    """The record of a finished training, written to train.json; continues from the last complete checkpoint.

    Raises InputError for a mesh or rows that do not fit the machine, MachineError where space or memory runs out, EngineError where the
    loss is no longer a number, and Preempted after SIGTERM, once the last step is saved.
    """
    clock, recipe = start_clock(), run.recipe
    batches = load_batches(run)
    variant = find_variant(recipe.model) if recipe.model else None
    checkpoint = open_checkpoint(recipe.checkpoint, variant=variant)
    mesh = make_mesh(recipe)
    with _one_line_errors(run):
        model = adapted_model(recipe, checkpoint, mesh)
        session = _Session(run, model, batches, mesh)
        with _stop_on_sigterm(session.stop):
            session.train()
        record = _make_record(run, clock, session, checkpoint.variant)
    write_record(run, record)
    return record


def adapted_model(recipe: Recipe, checkpoint: Checkpoint, mesh: Mesh) -> Gemma4:
    """The checkpoint's model on the mesh, with adapters at their start."""
    base = load_model(checkpoint, dtype=recipe.train.dtype, remat="none", mesh=mesh)
    model = add_adapters(base, checkpoint.variant, recipe.lora, seed=recipe.seed)
    model.remat = recipe.train.remat  # Qwix finds no projection inside a rematerialised layer, so only now
    return model


def make_mesh(recipe: Recipe) -> Mesh:
    """Devices in axes fsdp and tp: as the recipe says, or all of them in fsdp. Raises RecipeError where they cannot be laid out so."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise MachineError(f"no accelerator: {_last_line(error)}; unset JAX_PLATFORMS to train on what there is") from None
    wanted, rows = recipe.train.mesh, recipe.train.rows_per_step
    fsdp, tp = (len(devices), 1) if wanted == "auto" else (wanted.fsdp, wanted.tp)
    if fsdp * tp != len(devices):
        raise RecipeError(
            f"train.mesh: fsdp {fsdp} × tp {tp} needs {fsdp * tp} devices, this machine has {len(devices)} ({devices[0].device_kind}); "
            f"set their product to {len(devices)}, or auto"
        )
    if rows % fsdp:
        raise RecipeError(f"train.rows_per_step: {rows} rows do not divide over fsdp {fsdp}; set a multiple of {fsdp}")
    return jax.make_mesh((fsdp, tp), ("fsdp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto), devices=devices)


class _Session:
    """One attempt at a run: the trainer, its state on the devices, and the log."""

    def __init__(self, run: Run, model: Gemma4, batches: Batches, mesh: Mesh) -> None:
        recipe = run.recipe
        self.run, self.batches, self.mesh, self.model = run, batches, mesh, model
        self.stopping = threading.Event()
        self._mark_s = 0.0
        self.checkpoints = Checkpoints(
            run.checkpoints,
            every=recipe.train.checkpoint_every,
            keep=recipe.train.keep_checkpoints,
            before_save=self._before_save,
            after_save=self._start_clock,
        )
        self.trainer = Trainer(model, make_optimizer(recipe.optimizer), place=lambda moments: place_moments(moments, model, mesh))
        self.done = self._restore()
        self.trainer.start_at(self.done)
        self.step: Step = make_step(model, self.trainer.optimizer, mesh, dropout=recipe.lora.dropout, seed=recipe.seed)
        self.trainer.attach(update=self._update, finish=self._finish, load=self._load, checkpoints=self.checkpoints)
        self.inputs = input_shapes(mesh, rows=recipe.train.rows_per_step, length=recipe.data.max_length)
        self.trained, self.moments = self.step.trained, self.step.moments

    def stop(self) -> None:
        """Asks for an end after the step under way."""
        self.stopping.set()

    def train(self) -> None:
        """Trains what is left. Raises Preempted where it was stopped before the end."""
        with StepLog(self.run, steps=self.batches.steps, done=self.done) as self.log:
            self._start_clock()
            try:
                self.trainer.run()
            finally:
                # Also after Ctrl-C: a save that is still being written would otherwise meet the interpreter's end, or the next start.
                self.checkpoints.wait()
        last = self.trainer.train_steps
        if last < self.batches.steps:
            saved = f"step {last} is saved" if last else "nothing was trained yet"
            raise Preempted(f"stopped by SIGTERM: {saved}; continue with: gemsmith train {self.run.path}")

    def _restore(self) -> int:
        try:
            step, _ = self.checkpoints.maybe_restore(self.model, self.trainer.optimizer)
        except (ValueError, KeyError, OSError) as error:
            step = self.checkpoints.latest_step()
            raise RunError(
                f"{self.run.checkpoints}/{step}: cannot be restored ({_last_line(error)}); delete it to continue from an earlier one"
            ) from None
        return step

    def _load(self, step: int) -> tuple[int, Batch] | None:
        return None if self.stopping.is_set() or step > self.batches.steps else (step, self.batches.batch(step))

    def _update(self, example: tuple[int, Batch]) -> tuple[Any, Any]:
        step, batch = example
        if not batch.loss_mask.any():
            raise DataError(
                f"{self.run.data}: no token of step {step} is trained on; make the rows again with: gemsmith data {self.run.path}"
            )
        rate = learning_rate(self.run.recipe.optimizer, update=step - 1, updates=self.batches.steps)
        values = {
            "tokens": batch.tokens,
            "segments": batch.segments,
            "positions": batch.positions,
            "loss_mask": batch.loss_mask,
            "learning_rate": rate,
            "step": step,
        }
        inputs = {name: place(values[name], like) for name, like in self.inputs.items()}
        self.trained, self.moments, metrics = self.step.update(self.trained, self.moments, self.step.frozen, inputs)
        return metrics, (step, rate, int((batch.segments > 0).sum()), metrics)

    def _finish(self, pending: Any) -> None:
        """Waits for the step and logs it. Raises EngineError where its loss or gradient is no number."""
        number, rate, real_tokens, metrics = pending
        loss, grad_norm = (float(value) for value in jax.device_get((metrics["loss"], metrics["grad_norm"])))
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            saved = self.checkpoints.latest_step()
            kept = f"the last checkpoint is {self.run.checkpoints}/{saved}" if saved else "there is no checkpoint yet"
            raise EngineError(
                f"training stopped: step {number} has loss {loss} and gradient norm {grad_norm}; {kept}; "
                "lower optimizer.learning_rate, or look at the rows with: gemsmith data --show 3"
            )
        now_s = time.monotonic()
        step_s, self._mark_s = now_s - self._mark_s, now_s
        self.log.add(
            TrainStep(step=number, loss=loss, grad_norm=grad_norm, learning_rate=rate, real_tokens=real_tokens, step_s=round(step_s, 6))
        )

    def _before_save(self) -> None:
        self.trainer.finish_steps()
        self.log.sync()
        nnx.update(self.model, self.trained)
        nnx.update(self.trainer.optimizer, self.moments)

    def _start_clock(self) -> None:
        self._mark_s = time.monotonic()


def place(value: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The value as the step takes it: cast, and split over the devices."""
    return jax.device_put(np.asarray(value, like.dtype), like.sharding)


@contextlib.contextmanager
def _stop_on_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM, which announces a preemption, calls `stop` while the block runs."""
    if threading.current_thread() is not threading.main_thread():  # Python lets only the main thread set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _one_line_errors(run: Run) -> Iterator[None]:
    """Turns what Orbax and XLA raise on a full disk or full memory into one line; anything else passes."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        text = str(error)
        if "No space left on device" in text or "ENOSPC" in text:
            raise MachineError(
                f"no space left on device while writing under {run.path}; free some, or set train.keep_checkpoints lower, and run again"
            ) from None
        if "RESOURCE_EXHAUSTED" in text:
            raise MachineError(
                f"out of memory on {jax.devices()[0].device_kind}: {text.splitlines()[0][:200]}; lower train.rows_per_step or "
                "data.max_length, or set train.remat to layer"
            ) from None
        raise


def _make_record(run: Run, clock: Clock, session: _Session, variant: Variant) -> TrainRecord:
    steps, resumes = read_steps(run), read_resumes(run)
    compiling = {1, *(step + 1 for step in resumes)}
    timed = [step for step in steps if step.step not in compiling] or steps
    origin = make_origin(run, "train", clock, packages=_PACKAGES)
    accelerators = tuple(device.device_kind for device in jax.devices() if device.platform != "cpu")
    return TrainRecord(
        origin=origin.model_copy(update={"machine": origin.machine.model_copy(update={"accelerators": accelerators})}),
        backend="tunix",
        model=variant.name,
        steps=tuple(steps),
        adapted=count_adapted(session.model, variant),
        trained_parameters=sum(leaf.size for leaf in jax.tree.leaves(session.trained)),
        mesh=dict(session.mesh.shape),
        resumed_at=tuple(resumes),
        real_tokens_per_s=sum(step.real_tokens for step in timed) / sum(step.step_s for step in timed),
        peak_memory_bytes=peak_memory_bytes(),
        last_checkpoint=f"{run.checkpoints.name}/{session.checkpoints.latest_step()}",
    )


def peak_memory_bytes() -> int:
    """The most that any device held; on CPU, where devices do not say, the most that the process held."""
    held = [stats["peak_bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
    return max(held) if held else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
