"""The PyTorch backend: Gemma 4 in transformers, PEFT's adapters, TRL's SFTTrainer; on GPUs by FSDP2, or CPU.

It takes the batches, start, schedule and rules of the JAX backend, so that comparing the two compares machines and
stacks alone. Only the random bits of dropout differ.
"""

import contextlib
import errno
import gc
import os
import re
import resource
import time
import warnings
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import init_device_mesh

from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.data.batches import Batches, load_batches, load_eval_batches
from gemsmith.errors import USERS_ERRNOS, MachineError, explain_os_error, last_line
from gemsmith.hardware.model.limits import trl_mesh
from gemsmith.images.workers import count_processes
from gemsmith.recipe.schema import Mesh
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import Run, start_clock
from gemsmith.system.version import __version__
from gemsmith.train.inputs import Answers, ImageFeed, check_patching, load_init_adapter, load_samples, open_base
from gemsmith.train.loop import BackendInfo, StepOutcome, TrainSession, train_session
from gemsmith.train.resume import full_disk
from gemsmith.train.torch import model as trl_model
from gemsmith.train.torch.attention import kernels
from gemsmith.train.torch.checkpoints import PeftCheckpoints
from gemsmith.train.torch.distributed import ProcessGroup, count_gpus, joined, started_by_torchrun
from gemsmith.train.torch.trainer import TrlTrainer
from gemsmith.train.torch.upstream import quiet


def train_with_trl(run: Run, *, restart: bool = False) -> TrainRecord:
    """The record of a training that this process takes part in; continues from the last complete checkpoint.

    `restart`: see gemsmith.train.stage.train. Raises InputError for what the recipe asks and this backend or machine
    lacks, MachineError where memory or space runs out, EngineError where a loss is one that the recipe stops at, and
    Terminated after SIGTERM, once saved.
    """
    clock, recipe = start_clock(), run.recipe
    gpus = count_gpus()
    processes = int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1
    mesh, batches = trl_mesh(recipe, processes), load_batches(run)
    checkpoint = open_base(run)
    # Before cuBLAS starts: without, its sums differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with joined(gpus) as group, _one_line_errors(run), quiet(), warnings.catch_warnings():
        # Upstream's are about options that it is not asked for here, such as data preparation.
        warnings.simplefilter("ignore")
        if gpus:  # a resumed run must meet the bits that it would have had; on CPU torch's kernels do so anyway
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            # With experts, transformers asks for operations that have no deterministic form.
            torch.use_deterministic_algorithms(True, warn_only=bool(checkpoint.variant.experts))
        backend, variant = TrlBackend(run, checkpoint, batches, group, mesh), checkpoint.variant
        record = train_session(run, backend, steps=batches.steps, variant=variant, clock=clock, restart=restart)
    del backend
    gc.collect()
    torch.cuda.empty_cache()  # vLLM, which this process may start next, wants nearly all of the memory
    return record


class TrlBackend:
    """What gemsmith.train.loop.TrainBackend asks for, by TRL's trainer in each process of a group."""

    name = "trl"
    packages: tuple[str, ...] = ("torch", "transformers", "trl", "peft", "accelerate", "numpy")

    def __init__(self, run: Run, checkpoint: Checkpoint, batches: Batches, group: ProcessGroup, mesh: Mesh) -> None:
        self.writes = group.rank == 0
        self._run, self._checkpoint, self._batches, self._group, self._mesh = run, checkpoint, batches, group, mesh
        self._attention = "documents" if run.recipe.train.attention == "auto" else run.recipe.train.attention
        self.checkpoints = PeftCheckpoints(run, writes=self.writes)
        self._on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._patching = check_patching(checkpoint, batches, run.recipe.data, run.recipe.lora)
        self._held_out = load_eval_batches(run)
        if self._held_out and self._held_out.rows.images:
            check_patching(checkpoint, self._held_out, run.recipe.data, run.recipe.lora)
        most = batches.global_batch_size // (group.size * run.recipe.train.gradient_accumulation_steps)
        self._prompts = load_samples(run, checkpoint, parts=group.size, most=most)

    def prepare(self, session: TrainSession) -> None:
        recipe, checkpoint = self._run.recipe, self._checkpoint
        same = {"versions": [__version__, torch.__version__], "last checkpoint": session.done}
        self._group.agree(self._run, same)
        # Read before the base, which takes longer to load than to find a start that does not fit.
        full = recipe.train.method == "full"
        start = None if session.done or full else load_init_adapter(recipe, checkpoint.variant)
        group, mesh, vision = self._group, self._mesh, self._patching is not None
        # Split, it need not fit on one device: it is read into the machine's memory, and split layer by layer.
        place = group.device if group.size == 1 else torch.device("cpu")
        model = trl_model.adapted_model(recipe, checkpoint, self._attention, place, vision=vision)
        if group.size > 1:
            sizes, axes = (mesh.replica, mesh.fsdp), ("replica", "fsdp")
            trl_model.shard(model, init_device_mesh(group.device.type, sizes, mesh_dim_names=axes))
        self._session, self._model = session, model
        self._trainer = TrlTrainer(
            model, session, self._batches, group, finish=self._finish, attention=self._attention, checkpoint=checkpoint
        )
        if not session.done and not full:
            trl_model.set_weights(model, trl_model.start_weights(recipe, checkpoint.variant, start))

    def restore(self, step: int) -> None:
        weights, moments = self.checkpoints.read(step)
        trl_model.set_weights(self._model, weights)
        trl_model.set_moments(self._trainer.adamw, self._model, moments)

    def check_saved(self, step: int) -> None:
        self.checkpoints.read(step)

    def run(self) -> None:
        """Raises DataError where an image cannot be read any more, once the step before its own is saved."""
        if self._run.recipe.train.method == "lora":  # of all weights a save takes longer
            self._group.bound_waits()
        with contextlib.ExitStack() as stack:
            self._trainer.feed = self._feed(stack, self._batches, first=self._session.done + 1)
            self._refuse_fault()
            if not self._evaluate(self._session.done) or self._session.is_complete:
                return
            self._session.start_clock()
            self._trainer.train()
            if not self._session.is_complete:
                self._refuse_fault()

    def _feed(self, stack: contextlib.ExitStack, batches: Batches, *, first: int) -> ImageFeed | None:
        """The images of this process's rows until the stack ends; None where training's rows are text alone."""
        if self._patching is None:
            return None
        own, processes = self._group.rows(batches.global_batch_size), count_processes(32)
        options = {"first": first, "processes": max(1, processes // self._on_this_machine)}
        feed = ImageFeed(batches, self._patching, rows=range(own.start, own.stop), **options, ahead=1)
        stack.callback(feed.close)
        return feed

    def _evaluate(self, step: int) -> bool:
        """Evaluates after the step where that is due; False where it left off, since training is to stop."""
        session, last = self._session, step == self._batches.steps
        if self._held_out is None or not session.due(step):
            return True
        begun_s = time.monotonic()
        answers: Answers | None = ()

        def told() -> bool:
            return not last and session.stopping.is_set()

        with contextlib.ExitStack() as stack:
            sums = self._trainer.evaluate_held_out(self._held_out, self._feed(stack, self._held_out, first=1), told)
            if sums and self._prompts:
                feed = self._feed(stack, self._prompts.batches, first=1)
                answers = self._trainer.answer(self._prompts, feed, told)
        if sums is None or answers is None:
            return False
        session.evaluated(step, **sums, answers=answers, begun_s=begun_s)
        return True

    def _refuse_fault(self) -> None:
        """Raises in every process what one of them could not read for the next step."""
        feed, steps = self._trainer.feed, self._session.log.steps
        if feed is None:
            return
        fault = self._group.first_fault(feed.fault if feed.step == len(steps) + 1 else None)
        if fault is None:
            return
        saved = f"; step {steps[-1].step} is saved" if steps else ""
        raise type(fault)(f"step {len(steps) + 1} of training: {fault}{saved}")

    def _finish(self, outcome: StepOutcome) -> bool:
        """Logs and saves; whether to go on."""
        self._session.finish(outcome)
        step, session = outcome.plan.step, self._session
        goes_on = self._evaluate(step) and not outcome.should_stop and not session.is_complete
        if not goes_on or step % self._run.recipe.train.save_steps == 0 or step == session.best_step:
            begun_s = time.monotonic()
            # Every process gives its part, the first writes.
            weights = {name: trl_model.whole_array(value) for name, value in trl_model.trained_weights(self._model)}
            moments = trl_model.whole_moments(self._trainer.adamw, self._model)
            self.checkpoints.save(step, weights, moments, session.metadata())
            size_bytes = sum(array.nbytes for array in (*moments.values(), *weights.values()))
            session.saved(time.monotonic() - begun_s, size_bytes)
        return goes_on

    def facts(self) -> BackendInfo:
        train, group, variant = self._run.recipe.train, self._group, self._checkpoint.variant
        dtype = torch.float32 if train.dtype == "float32" else torch.bfloat16
        on_gpu = group.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(group.device) if on_gpu else 0
        real, padded = self._trainer.patches.tolist()
        return BackendInfo(
            accelerators=(torch.cuda.get_device_name(group.device),) * group.size if on_gpu else (),
            trained_parameters=sum(weight.numel() for weight in self._trainer.trained),
            mesh=self._mesh.model_dump(),
            attention=kernels(self._attention, trl_model.attention_heads(variant), group.device, dtype),
            remat="none" if train.remat == "none" else "layer",
            hosts=max(1, group.size // self._on_this_machine),
            peak_memory_bytes=peak if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            padding_fraction=1 - real / padded if padded else 0.0,
        )


@contextlib.contextmanager
def _one_line_errors(run: Run) -> Iterator[None]:
    """Turns what torch and the system raise on full memory or disk into one line; anything else passes."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what, *_ = re.split(r" (?:Including|Process) ", last_line(error).removeprefix("CUDA out of memory. "))
        raise MachineError(
            f"out of memory on {torch.cuda.get_device_name()}: {what.rstrip('.')}; raise "
            "train.gradient_accumulation_steps, lower train.global_batch_size or data.max_length, or set "
            "train.remat to layer"
        ) from None
    except OSError as error:
        if error.errno not in USERS_ERRNOS:
            raise
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(explain_os_error(error)) from None
        raise full_disk(run) from None
