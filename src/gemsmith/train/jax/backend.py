"""The JAX backend: Gemma 4 with Qwix's adapters in Tunix's PeftTrainer, on whatever devices JAX finds.

Every step is a function of the recipe and its number: batch, dropout and learning rate. So a run that was killed
continues from its last complete checkpoint and ends with the bytes of one that never stopped.
"""

import contextlib
import logging
import resource
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.checkpoints.steps import LEFT_OVER, drop_leftovers
from gemsmith.data.batches import Batches, BucketShape, load_batches, load_eval_batches
from gemsmith.errors import MachineError, first_line
from gemsmith.hardware.model import ImageWork, images_of
from gemsmith.models import Gemma4, abstract_model, base_kinds, load_model
from gemsmith.models.sharding import BATCH, axis_size
from gemsmith.recipe.backends import LANES
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import Run, start_clock
from gemsmith.train.inputs import ImageFeed, load_init_adapter, load_samples, open_base
from gemsmith.train.jax import distributed
from gemsmith.train.jax.checkpoints import OrbaxCheckpoints
from gemsmith.train.jax.compile import Compiled, compile_program, use_compile_cache
from gemsmith.train.jax.evaluation import HeldOut
from gemsmith.train.jax.images import Arrays, ImageLayout, count_buckets, image_input
from gemsmith.train.jax.lora import add_adapters
from gemsmith.train.jax.mesh import make_execution, make_mesh, micro_batches_on
from gemsmith.train.jax.step import input_shapes, make_optimizer, make_step, shard_opt_state
from gemsmith.train.jax.upstream import TunixTrainer
from gemsmith.train.loop import BackendInfo, Plan, StepOutcome, TrainSession, train_session
from gemsmith.train.resume import full_disk

# Orbax and tensorstore raise a full disk as text, and print a traceback for each array.
_FULL = ("No space left on device", "ENOSPC", "Disk quota exceeded")


def is_full_disk(error: BaseException | None) -> bool:
    """Whether the error, or one that it came of, says that the disk has no space left for this user."""
    while error is not None:
        if any(words in str(error) for words in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def drop_tracebacks_of_a_full_disk() -> None:
    """From here on, what threads that save log and print of a full disk is left out.

    It stays so until the process ends, since these threads outlive the save. All else is printed as before.
    """
    for logger in map(logging.getLogger, ("absl", "asyncio")):
        logger.addFilter(_says_more)
    drop_leftovers()


def _says_more(record: logging.LogRecord) -> bool:
    """Whether a record is about anything but a full disk and what comes of it, or a stop, as Orbax logs Ctrl-C."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return False
    return not (is_full_disk(error) or any(words in record.getMessage() for words in (*_FULL, *LEFT_OVER)))


def train_with_tunix(run: Run, *, restart: bool = False) -> TrainRecord:
    """The record of a finished training, written to train.json; continues from the last complete checkpoint.

    `restart`: see gemsmith.train.stage.train. Raises InputError for a mesh or rows that do not fit the machine,
    MachineError where space or memory runs out, EngineError where a loss is one that the recipe stops at, and
    Terminated after SIGTERM, once the last step is saved.
    """
    clock, recipe = start_clock(), run.recipe
    drop_tracebacks_of_a_full_disk()
    use_compile_cache()
    with distributed.joined_hosts():
        distributed.check_accelerator()
        batches = load_batches(run)
        checkpoint = open_base(run)
        mesh = make_mesh(recipe, checkpoint.variant)
        distributed.check_hosts(run)
        with _one_line_errors(run):
            backend, variant = TunixBackend(run, checkpoint, batches, mesh), checkpoint.variant
            return train_session(run, backend, steps=batches.steps, variant=variant, clock=clock, restart=restart)


def adapted_model(
    recipe: Recipe, checkpoint: Checkpoint, mesh: Mesh, *, vision: bool = False, images: ImageWork | None = None
) -> Gemma4:
    """The checkpoint's model on the mesh, with adapters at their start: the recipe's, or one that is new.

    Where train.method is full, its weights are trained instead, and float32.
    With `vision` it takes images; `images`, those of the rows, count towards the memory that train.remat leaves.
    """
    variant, full = checkpoint.variant, recipe.train.method == "full"
    start = None if full else load_init_adapter(recipe, variant)
    dtype, quantized = base_kinds(recipe.train.dtype)
    how = make_execution(recipe, variant, mesh, images=images)
    model = abstract_model(variant, dtype=dtype, quantized=quantized, execution=how, vision=vision, trains=full)
    base = load_model(checkpoint, model)
    return base if full else add_adapters(base, variant, recipe.lora, seed=recipe.seed, start=start)


def _when_ready(arrays: Any) -> float:
    jax.block_until_ready(arrays)
    return time.monotonic()


class TunixBackend:
    """What gemsmith.train.loop.TrainBackend asks for, by a Tunix trainer on the devices of a mesh."""

    name = "tunix"
    packages: tuple[str, ...] = ("jax", "flax", "qwix", "google-tunix", "optax", "orbax-checkpoint", "numpy")

    def __init__(self, run: Run, checkpoint: Checkpoint, batches: Batches, mesh: Mesh) -> None:
        self.writes = jax.process_index() == 0
        self._run, self._checkpoint, self._batches, self._mesh = run, checkpoint, batches, mesh
        self._session: TrainSession
        self._images = image_input(checkpoint, batches, run.recipe.data, run.recipe.lora)
        self._feed: ImageFeed | None = None
        rows = load_eval_batches(run)
        self._held_out = HeldOut(rows, self._images_of(rows), mesh, None) if rows else None
        parts, micro = axis_size(mesh, BATCH), micro_batches_on(run.recipe, checkpoint.variant, mesh)
        most, multiple = batches.global_batch_size // (parts * micro), LANES * axis_size(mesh, "sequence")
        samples = load_samples(run, checkpoint, parts=parts, most=most, multiple=multiple)
        prompts = samples.batches if samples else None
        self._prompts = HeldOut(prompts, self._images_of(prompts), mesh, samples) if prompts else None
        self._compiled: dict[BucketShape | None, Compiled] = {}
        # A GPU's dispatch of the next step lasts until that is nearly over, so the main thread sees none end.
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="step-end")
        self.checkpoints = OrbaxCheckpoints(
            run, best_step=lambda: self._session.best_step, before_save=self._before_save, after_save=self._after_save
        )

    @cached_property
    def model(self) -> Gemma4:
        recipe, variant, images = self._run.recipe, self._checkpoint.variant, None
        if self._images:
            images = images_of(recipe, variant, **self._images.buckets.buckets[-1]._asdict())
        return adapted_model(recipe, self._checkpoint, self._mesh, vision=images is not None, images=images)

    @cached_property
    def trainer(self) -> TunixTrainer:
        trainer = TunixTrainer(self.model, make_optimizer(self._run.recipe.optimizer))
        trainer.checkpoint_manager = self.checkpoints
        nnx.update(trainer.optimizer, shard_opt_state(nnx.state(trainer.optimizer), self.model))
        return trainer

    def prepare(self, session: TrainSession) -> None:
        self._session = session
        self.trainer.start_at(session.done)

    def restore(self, step: int) -> None:
        restored = self.checkpoints.read(step, self.model, self.trainer.optimizer)
        nnx.update(self.model, restored["model_params"])
        nnx.update(self.trainer.optimizer, restored["optimizer_state"])

    def check_saved(self, step: int) -> None:
        self.checkpoints.read(step, self.model, self.trainer.optimizer)

    def run(self) -> None:
        """Compiles the step for every bucket still to come, and runs it; where SIGTERM comes first, it runs none.

        Raises DataError where an image cannot be read any more, once the step before its own is saved.
        """
        session = self._session
        try:
            self._make_step()
            if self._images:
                # Several hosts stop two steps after one of them has asked for it. An image that cannot be read for the
                # first step is found before that is compiled.
                ahead, first = 2 if jax.process_count() > 1 else 0, session.done + 1
                self._feed = self._images.feed(self._batches, rows=self._rows, first=first, ahead=ahead)
                distributed.raise_on_all_hosts(self._feed.fault)
            goes_on = distributed.holds_on_all_hosts(self._compile())
            distributed.note_progress()
            if not goes_on:
                return
            self._evaluate(session.done)
            session.start_clock()
            self.trainer.run(update=self._update, finish=self._finish, evaluate=self._evaluate, load=self._load)
            self._refuse_fault()
        finally:
            self._watcher.shutdown(wait=False)
            if self._feed:
                self._feed.close()
            # Also after Ctrl-C: a save under way would otherwise meet the interpreter's end, or the next start.
            begun_s = time.monotonic()
            self.checkpoints.wait()
            session.saved(time.monotonic() - begun_s, 0)

    def _compile(self) -> bool:
        """Whether all programs are there, before this host was told to stop."""
        stop, train = self._session.stopping, self._run.recipe.train
        for bucket, inputs in self._inputs.items():
            arguments = (self.trained, self.moments, self._step.frozen, inputs)
            compiled = compile_program(self._step.update, arguments, stop, train)
            if compiled is None:
                return False
            self._compiled[bucket] = compiled
        held_out = filter(None, (self._held_out, self._prompts))
        return all(each.compile(self._step, stop, train) for each in held_out)

    def _make_step(self) -> None:
        """The step as a function of its state, which is that of model and optimizer now."""
        recipe, optimizer = self._run.recipe, self.trainer.optimizer
        lora = None if recipe.train.method == "full" else recipe.lora
        micro_batches = micro_batches_on(recipe, self.model.variant, self._mesh)
        self._step = make_step(self.model, optimizer, lora=lora, seed=recipe.seed, micro_batches=micro_batches)
        self.trained, self.moments = self._step.trained, self._step.moments
        how, rows, length = self._images, recipe.train.global_batch_size, recipe.data.max_length
        left = range(self._session.done + 1, self._batches.steps + 1)
        first_of_each_bucket = {self._bucket(step): step for step in reversed(left)}
        self._inputs = {
            bucket: input_shapes(self._mesh, rows=rows, length=length, images=how.shape(step) if how else None)
            for bucket, step in first_of_each_bucket.items()
        }
        self._rows = distributed.local_rows(next(iter(self._inputs.values()))["tokens"])

    def _images_of(self, batches: Batches) -> ImageLayout | None:
        """Of held-out rows, which need none where training's do."""
        recipe = self._run.recipe
        return image_input(self._checkpoint, batches, recipe.data, recipe.lora) if batches.rows.images else None

    def _bucket(self, step: int) -> BucketShape | None:
        return self._images.buckets.of(step) if self._images else None

    def _refuse_fault(self) -> None:
        steps = self._session.log.steps
        last = steps[-1].step if steps else 0
        if self._feed is None or self._session.is_complete:
            return
        fault, saved = None, f"; step {last} is saved"
        if (found := self._feed.fault) and not self._session.stopping.is_set():
            fault = type(found)(f"step {self._feed.step} of training: {found}{saved}")
        distributed.raise_on_all_hosts(fault, saved=saved)

    def _load(self, step: int) -> tuple[int, Arrays] | None:
        # Several hosts must stop after the same step, so there the step's own sum over all of them decides.
        session = self._session
        told = session.should_stop if jax.process_count() > 1 else session.stopping.is_set()
        if told or step > self._batches.steps or session.early_stop:
            return None
        if self._feed is None or self._images is None:
            return step, self._batches.batch(step, self._rows).arrays()
        taken = self._feed.take()
        return None if taken is None else (step, self._images.arrays(step, *taken))

    def _update(self, example: tuple[int, Arrays]) -> tuple[Any, Any]:
        step, arrays = example
        plan, before = self._session.plan(step), self._session.log.steps
        # Some steps take long by their size: how long is known once one has ended.
        timed = before and self._run.recipe.train.method != "full"
        distributed.note_progress(longest_s=max(distributed.LONGEST_STEP_S, 10 * before[-1].step_s) if timed else None)
        numbers = {
            "learning_rate": plan.learning_rate,
            "step": step,
            "skip_above": plan.skip_above,
            "stop": self._session.stopping.is_set() or bool(self._feed and self._feed.fault),
        }
        bucket = self._bucket(step)
        shapes, update, frozen = self._inputs[bucket], self._compiled[bucket].update, self._step.frozen
        inputs = distributed.shard_batch(arrays, self._rows, shapes)
        inputs |= {name: distributed.place(number, shapes[name]) for name, number in numbers.items()}
        self.trained, self.moments, metrics = update(self.trained, self.moments, frozen, inputs)
        if self._session.restart:
            # Before the step is over for Tunix: Orbax saves none that lies before one that is there.
            jax.block_until_ready(metrics)
            self._session.delete_previous_run()
        return metrics, (plan, metrics, self._watcher.submit(_when_ready, metrics))

    def _finish(self, pending: tuple[Plan, Any, Future[float]]) -> None:
        plan, metrics, ended = pending
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        should_stop = bool(values.pop("stop"))
        self._session.finish(StepOutcome(plan=plan, should_stop=should_stop, ended_s=ended.result(), **values))

    def _evaluate(self, step: int) -> None:
        """Evaluates after the step where that is due; training on one host leaves off where it is told to stop."""
        session = self._session
        if self._held_out is None or not session.due(step):
            return
        self.trainer.finish_steps()
        begun_s, goes_on = time.monotonic(), step == self._batches.steps or jax.process_count() > 1
        if not session.due(step):
            return

        def told() -> bool:  # before each batch
            distributed.note_progress()
            return not goes_on and session.stopping.is_set()

        given = (self.trained, self._step.frozen, told)
        sums = self._held_out.evaluate(*given)
        answers = self._prompts.answer(*given) if sums and self._prompts else ()
        if sums and answers is not None:
            session.evaluated(step, **sums, answers=answers, begun_s=begun_s)

    def _before_save(self) -> dict[str, Any]:
        self.trainer.finish_steps()
        nnx.update(self.model, self.trained)
        nnx.update(self.trainer.optimizer, self.moments)
        return self._session.metadata()

    def _after_save(self, seconds: float, size_bytes: int) -> None:
        self._session.saved(seconds, size_bytes)

    def facts(self) -> BackendInfo:
        execution, variant = self.model.execution, self.model.variant
        steps, how = self._session.log.steps, self._images
        compiled = list(self._compiled.values())
        for held_out in filter(None, (self._held_out, self._prompts)):
            compiled += held_out.compiled.values()
        rows = self._batches.global_batch_size
        buckets = count_buckets(how, steps, rows) if how else ()
        room = rows * sum(how.buckets.of(step.step).size for step in steps) if how else 0
        # The splash kernel's mask cannot depend on the rows (models/gemma4.py).
        nearby = "dense" if how and variant.bidirectional_images else execution.attention
        # On CPU devices do not say what they held: there it is the most that the process held.
        held = [stats["peak_bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
        return BackendInfo(
            accelerators=distributed.find_accelerators(),
            trained_parameters=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.model, nnx.LoRAParam))),
            mesh=dict(self._mesh.shape),
            attention={
                "sliding_attention": f"{nearby}, head_dim {variant.head_dim}",
                "full_attention": f"{execution.attention}, head_dim {variant.global_head_dim}",
            },
            remat=execution.remat,
            hosts=jax.process_count(),
            peak_memory_bytes=max(held) if held else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            compile_s=round(sum(one.seconds for one in compiled), 3),
            compiled_from_cache=bool(compiled) and all(one.from_cache for one in compiled),
            padding_fraction=1 - sum(step.soft_tokens for step in steps) / room if room else 0.0,
            buckets=buckets,
        )


@contextlib.contextmanager
def _one_line_errors(run: Run) -> Iterator[None]:
    """Turns what Orbax and XLA raise on a full disk or full memory into one line; anything else passes."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        if is_full_disk(error):
            raise full_disk(run) from None
        if "RESOURCE_EXHAUSTED" in str(error):
            raise MachineError(
                f"out of memory on {jax.devices()[0].device_kind}: {first_line(error)}; lower "
                "train.global_batch_size or data.max_length, or set train.remat to layer"
            ) from None
        raise
