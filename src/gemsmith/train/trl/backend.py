"""The PyTorch backend: Gemma 4 in transformers with PEFT's adapters in TRL's SFTTrainer, on one GPU, several by FSDP2,
or CPU.

It takes the batches, start, schedule and rules of the JAX backend, so that comparing the two compares machines and
stacks alone. Only the random bits of dropout differ.
"""

import contextlib
import errno
import os
import resource
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from gemsmith import __version__
from gemsmith.checkpoint import Checkpoint, open_checkpoint
from gemsmith.checkpoint.saved import has_checksums, no_checksums
from gemsmith.data import Batches, load_batches
from gemsmith.errors import USERS_ERRNOS, DamageError, MachineError, RunError, explain_os_error, last_line
from gemsmith.provenance import Clock, start_clock
from gemsmith.recipe import Mesh
from gemsmith.records import DataRecord, TrainRecord, TrainStep
from gemsmith.run import Run, make_origin, read_record, stage_keys, write_record
from gemsmith.sizing.limits import trl_mesh
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
from gemsmith.train.spikes import spike_limit
from gemsmith.train.steps import schedule_notices
from gemsmith.train.trl.attention import kernels
from gemsmith.train.trl.checkpoints import Arrays, Checkpoints
from gemsmith.train.trl.group import Group, joined
from gemsmith.train.trl.launch import count_gpus, started_by_torchrun
from gemsmith.train.trl.model import (
    adapted_model,
    attention_heads,
    count_adapted,
    matrices_of,
    set_moments,
    set_start,
    shard,
    whole_array,
    whole_moments,
)
from gemsmith.train.trl.trainer import Hooks, StepResult, Trainer
from gemsmith.zoo import VARIANTS, Variant, find_variant

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy")
_OF_ONE_MACHINE = ("checkpoint", "data.train", "data.template", "train.start_adapter")


def train_with_trl(run: Run, *, fresh: bool = False) -> TrainRecord:
    """The record of a training that this process takes part in, written to train.json; continues from the last complete
    checkpoint.

    `fresh`: see gemsmith.train.stage.train. Raises InputError for what the recipe asks and this backend or machine has
    not, MachineError where memory or space runs out, EngineError where a loss is one that the recipe stops at, and
    Preempted after SIGTERM, once saved.
    """
    clock, recipe = start_clock(), run.recipe
    gpus = count_gpus()
    processes = int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1
    mesh, batches = trl_mesh(recipe, processes), load_batches(run)
    variant = find_variant(recipe.model) if recipe.model in VARIANTS else None
    checkpoint, checkpoints = open_checkpoint(recipe.checkpoint, variant=variant), Checkpoints(run)
    attention = "documents" if recipe.train.attention == "auto" else recipe.train.attention
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # before cuBLAS starts: without, its sums differ from run to run
    with joined(gpus) as group, _one_line_errors(run), _quiet():
        _be_deterministic(group.device, checkpoint.variant)
        parts = _Parts(
            checkpoint=checkpoint, checkpoints=checkpoints, batches=batches, group=group, mesh=mesh, attention=attention
        )
        session = _Session(run, parts, fresh=fresh)
        with stop_on_sigterm(session.stopping.set):
            session.train()
        record = _make_record(run, clock, session)
        if group.rank == 0:
            write_record(run, record)
    return record


class _Session:
    """One attempt at a run: the trainer, its state on this process's device, and the log."""

    def __init__(self, run: Run, parts: "_Parts", *, fresh: bool) -> None:
        self.run, self.parts, self.fresh = run, parts, fresh
        self.stopping, self._mark_s = threading.Event(), 0.0
        self.start_adapter_sha256 = start_adapter_hash(run.recipe)
        self.notices: tuple[str, ...] = ()
        self.done, kept, self._resumed_at = (0, [], []) if fresh else self._kept()
        parts.group.agree(run, self._common())
        # Read before the base, which takes longer to load than to find a start that does not fit.
        self._start = None if self.done else read_start_adapter(run.recipe, parts.checkpoint.variant)
        self.model = self._make_model()
        self.trainer = self._make_trainer()
        self._set_state()
        self.log = StepLog(kept, self._sinks(kept) if parts.group.rank == 0 else ())

    @property
    def resumed_at(self) -> list[int]:
        """Steps after which the run was continued from a checkpoint."""
        went_on = self.done and len(self.log.steps) > self.done
        return [*self._resumed_at, self.done] if went_on else self._resumed_at

    def train(self) -> None:
        """Trains what is left. Raises Preempted where it was stopped before the end."""
        last = self.done
        if self.done < self.trainer.batches.steps:
            with self.log:
                self._mark_s = time.monotonic()
                self.trainer.train()
            last = self.log.steps[-1].step
        if last < self.trainer.batches.steps:
            raise preempted(self.run, last)

    def _common(self) -> dict[str, Any]:
        """What all processes must have the same of; keys that name places of one machine may differ."""
        keys = {
            name: value for name, value in stage_keys(self.run.recipe, "train").items() if name not in _OF_ONE_MACHINE
        }
        rows = read_record(self.run, DataRecord).rows_sha256
        return {
            "recipe": keys,
            "rows": rows,
            "checkpoint to go on from": self.done,
            "versions": [__version__, torch.__version__],
        }

    def _make_model(self) -> peft.PeftModel:
        recipe, group, mesh = self.run.recipe, self.parts.group, self.parts.mesh
        # Split, it need not fit on one device: it is read into the machine's memory, and split layer by layer.
        place = group.device if group.size == 1 else torch.device("cpu")
        model = adapted_model(recipe, self.parts.checkpoint, self.parts.attention, place)
        if group.size > 1:
            shard(
                model,
                init_device_mesh(group.device.type, (mesh.replica, mesh.fsdp), mesh_dim_names=("replica", "fsdp")),
            )
        return model

    def _make_trainer(self) -> Trainer:
        return Trainer(
            self.model,
            self.run.recipe,
            self.parts.batches,
            self.parts.group,
            Hooks(spike_limit=self._spike_limit, finish=self._finish, told_to_stop=self.stopping.is_set),
            done=self.done,
            attention=self.parts.attention,
            checkpoint=self.parts.checkpoint,
            folder=self.run.logs,
        )

    def _sinks(self, kept: list[TrainStep]) -> tuple[StepsFile, Events, Display]:
        steps = self.trainer.batches.steps
        return StepsFile(self.run, kept), Events(self.run, done=self.done), Display(steps=steps, done=self.done)

    def _kept(self) -> tuple[int, list[TrainStep], list[int]]:
        """The step to go on after, the steps up to it, and those after which earlier attempts went on."""
        checkpoints = self.parts.checkpoints
        if others := checkpoints.others():
            raise RunError(
                f"{checkpoints.folder}/{others[-1]}: was trained with another recipe: train.backend was not trl; set "
                f"train.checkpoint_folder to another, or start again with: gemsmith train {self.run.path} --force"
            )
        step = checkpoints.latest_step()
        if step is None:
            return 0, [], []
        with self._one_line_damage(step):
            metadata = checkpoints.read_metadata(step)
            steps = kept_steps(self.run, f"{checkpoints.folder}/{step}", metadata, self.start_adapter_sha256)
            self.notices = () if has_checksums(metadata) else (no_checksums(f"{checkpoints.folder}/{step}"),)
            return step, steps, list(metadata["resumed_at"])

    def _set_state(self) -> None:
        """Adapters and moments as the checkpoint has them that is continued from, or at their start."""
        recipe, variant = self.run.recipe, self.parts.checkpoint.variant
        model, optimizer = self.model, self.trainer.adamw
        if not self.done:
            set_start(model, recipe, variant, self._start)
            return
        with self._one_line_damage(self.done):
            adapter, moments = self.parts.checkpoints.read(self.done)
            set_start(model, recipe, variant, adapter)
            set_moments(optimizer, model, moments)

    @contextlib.contextmanager
    def _one_line_damage(self, step: int) -> Iterator[None]:
        try:
            yield
        except (DamageError, ValueError, KeyError, TypeError) as error:
            checkpoints = self.parts.checkpoints
            raise damaged_step(
                self.run, [other for other in checkpoints.steps() if other <= step], error, self._is_good
            ) from None

    def _is_good(self, step: int) -> bool:
        try:
            self.parts.checkpoints.read(step)
        except DamageError:
            return False
        return True

    def _spike_limit(self, step: int) -> float:
        return spike_limit([done.loss for done in self.log.steps], step, self.run.recipe.train.spike_factor)

    def _finish(self, result: StepResult) -> bool:
        """Logs and saves; whether to go on. Raises EngineError where the recipe stops there, DataError where nothing
        was trained.
        """
        refuse_no_targets(self.run, result.number, result.targets)
        if self.fresh:
            self._forget_earlier()
        now_s = time.monotonic()
        step_s, self._mark_s = now_s - self._mark_s, now_s
        step = TrainStep(
            step=result.number,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            real_tokens=result.real_tokens,
            step_s=round(step_s, 6),
            spike=is_spike(result.loss, result.limit),
            skipped=result.skipped,
        )
        train, steps = self.run.recipe.train, self.trainer.batches.steps
        refuse_to_go_on(self.run, [*self.log.steps, step], train, self.parts.checkpoints.latest_step())
        self.log.add(step)
        if result.told_to_stop or step.step == steps or step.step % train.checkpoint_every == 0:
            self._save(step.step)
        return not result.told_to_stop

    def _save(self, step: int) -> None:
        """Every process gives its part, the first writes."""
        matrices: dict[str, Arrays] = {}
        for module, side, weight in matrices_of(self.model):
            matrices.setdefault(module, {})[side] = whole_array(weight)
        moments = whole_moments(self.trainer.adamw, self.model)
        if self.parts.group.rank == 0:
            metadata = checkpoint_metadata(self.run, self.log.steps, self.resumed_at, self.start_adapter_sha256)
            self.parts.checkpoints.save(step, matrices, moments, metadata)
        self._mark_s = time.monotonic()

    def _forget_earlier(self) -> None:
        """Deletes what an earlier training left, now that a step has shown that mesh, rows and memory do."""
        if self.parts.group.rank == 0:
            self.parts.checkpoints.delete_all()
            forget_earlier(self.run)
        self.fresh = False


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a session is made of, checked before anything costly starts."""

    checkpoint: Checkpoint
    checkpoints: Checkpoints
    batches: Batches
    group: Group
    mesh: Mesh
    attention: str


def _be_deterministic(device: torch.device, variant: Variant) -> None:
    """A run that goes on must meet the bits that it would have had; on CPU torch's kernels do so by themselves."""
    if device.type == "cuda":
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # With experts, transformers asks for operations that have no deterministic form.
        torch.use_deterministic_algorithms(True, warn_only=bool(variant.experts))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Upstream's notes are about options that it is not asked for here, such as data preparation."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()


@contextlib.contextmanager
def _one_line_errors(run: Run) -> Iterator[None]:
    """Turns what torch and the system raise on full memory, or where the disk refuses, into one line; anything else
    passes.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MachineError(
            f"out of memory on {torch.cuda.get_device_name()}: {last_line(error)}; raise train.micro_batches, lower "
            "train.rows_per_step or "
            "data.max_length, or set train.remat to layer"
        ) from None
    except OSError as error:
        if error.errno not in USERS_ERRNOS:
            raise
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(explain_os_error(error)) from None
        raise full_disk(run) from None


def _make_record(run: Run, clock: Clock, session: _Session) -> TrainRecord:
    steps, resumes, parts = session.log.steps, session.resumed_at, session.parts
    warming = {1, *(step + 1 for step in resumes)}
    timed = [step for step in steps if step.step not in warming] or steps
    inside = run.recipe.train.checkpoint_folder is None
    start, device, variant = session.start_adapter_sha256, parts.group.device, parts.checkpoint.variant
    origin = make_origin(
        run, "train", clock, packages=_PACKAGES, sources={"train.start_adapter": start} if start else None
    )
    accelerators = (torch.cuda.get_device_name(device),) * parts.group.size if device.type == "cuda" else ()
    dtype = torch.float32 if run.recipe.train.dtype == "float32" else torch.bfloat16
    return TrainRecord(
        origin=origin.model_copy(update={"machine": origin.machine.model_copy(update={"accelerators": accelerators})}),
        backend="trl",
        model=variant.name,
        steps=tuple(steps),
        warmup_steps=run.recipe.optimizer.warmup(session.trainer.batches.steps),
        adapted=count_adapted(session.model, variant),
        trained_parameters=sum(weight.numel() for weight in session.trainer.trained),
        base_dtype=run.recipe.train.dtype,
        mesh=parts.mesh.model_dump(),
        remat="none" if run.recipe.train.remat == "none" else "layer",
        attention=kernels(parts.attention, attention_heads(variant), device, dtype),
        resumed_at=tuple(resumes),
        spikes=tuple(step.step for step in steps if step.spike),
        skipped=tuple(step.step for step in steps if step.skipped),
        hosts=max(1, parts.group.size // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        real_tokens_per_s=sum(step.real_tokens for step in timed) / sum(step.step_s for step in timed),
        peak_memory_bytes=peak_memory_bytes(device),
        last_checkpoint=f"{'checkpoints' if inside else run.checkpoints}/{parts.checkpoints.latest_step()}",
        notices=(
            *session.notices,
            *schedule_notices(run.recipe.optimizer, session.trainer.batches.steps),
            *unfallen_notices(steps, run.recipe),
        ),
        grave_notices=risen_notices(steps, run.recipe),
    )


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process's GPU held; on CPU, the most that the process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
