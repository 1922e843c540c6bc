"""TRL's SFTTrainer over our packed rows: its loop, with our batches, loss, schedule and decision which steps count.

A step is a function of the recipe and its number, as in the JAX backend: rows, learning rate, dropout. TRL is given
AdamW with the schedule, a loader, a loss and a callback. docs/numerics.md says whose code runs which part of a step.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.data.batches import Batches
from gemsmith.data.packing import Rows
from gemsmith.recipe.schema import Recipe
from gemsmith.train.inputs import Answers, ImageFeed, SamplePrompts
from gemsmith.train.loop import StepOutcome, TrainSession
from gemsmith.train.schedule import learning_rate
from gemsmith.train.torch.attention import attention_inputs
from gemsmith.train.torch.distributed import ProcessGroup
from gemsmith.train.torch.images import Images, count_patches, number_images, pad_images


class TrlTrainer(SFTTrainer):
    """The steps of a run after `done`."""

    # A sum over the step's count is not divided again by the number of micro-batches.
    loss_is_scaled_for_ga = True  # type: ignore[assignment]

    def __init__(
        self,
        model: Any,
        session: TrainSession,
        batches: Batches,
        group: ProcessGroup,
        *,
        finish: Callable[[StepOutcome], bool],
        attention: str,
        checkpoint: Checkpoint,
    ) -> None:
        """`finish`: logs, saves or raises; returns whether to go on."""
        self.recipe, self.batches, self.group, self.done = session.run.recipe, batches, group, session.done
        self._attention, self._variant = attention, checkpoint.variant
        self._image_token: int = checkpoint.config.get("image_token_id", -1)
        self.feed: ImageFeed | None = None  # the images of this process's rows; None where rows are text alone
        self.patches = np.zeros(2, np.int64)  # see images.count_patches: of this attempt's steps
        self.sums, self.counts = torch.zeros(2, device=group.device), dict[str, int]()
        """Of the step under way, this process's part of loss and correct tokens, and what the whole of it holds."""
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = self.recipe.optimizer
        # As Hugging Face's own, decay leaves norms and router scales alone; of adapters every tensor is a matrix.
        vectors = {"params": [weight for weight in self.trained if weight.ndim < 2], "weight_decay": 0.0}
        groups: list[dict[str, Any]] = [{"params": [weight for weight in self.trained if weight.ndim > 1]}, vectors]
        self.adamw = torch.optim.AdamW(
            groups,
            lr=1.0,  # times what the schedule says
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=group.device.type == "cuda",
        )
        schedule = LambdaLR(
            self.adamw, lambda update: learning_rate(optimizer, update=self.done + update, updates=batches.steps)
        )
        super().__init__(
            model,
            _config(self.recipe, group, steps=batches.steps - self.done, folder=session.run.logs),
            # TRL looks at one row; the loader below gives the others.
            train_dataset=datasets.Dataset.from_list([{"input_ids": batches.rows.tokens[0].tolist()}]),
            processing_class=transformers.AutoTokenizer.from_pretrained(checkpoint.folder),
            callbacks=[_StepCallback(self, session, finish)],
            optimizers=(self.adamw, schedule),
        )
        self.remove_callback(transformers.PrinterCallback)
        for weight in self.trained:
            weight.data = weight.data.float()  # TRL casts adapters of a quantized base to bfloat16

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        assert not return_outputs and num_items_in_batch is None, "there are no logits, and no labels"
        (nll, correct), self.counts = model(**inputs["rows"]), inputs["counts"]
        count = max(1, self.counts["targets"])
        self.sums += torch.stack([nll.detach() / count, correct])
        # Gradients are averaged over processes, and the count is that of all of them.
        return nll / (count / self.group.size)

    def evaluate_held_out(
        self, batches: Batches, feed: ImageFeed | None, told: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Over all rows the sum of the targets' nll, how many targets are correct, and how many there are.

        None where a process was `told` to stop. `feed`: images of this process's rows; None where training has none.
        """
        total, stops = np.zeros(3), 0.0
        with evaluating(self.model, self.recipe, self.group) as model:
            for _, batch, images in _read(batches, feed, self.group):
                parts = [
                    torch.stack(model(**self._prepare_inputs(rows))).tolist() for rows in self._own_rows(batch, images)
                ]
                nll, correct, stops = self.group.total([*np.sum(parts, axis=0).tolist(), float(told())])
                if stops:
                    break
                total += np.array([nll, correct, np.count_nonzero(batch.loss_mask[:, 1:])])
        return None if stops else dict(zip(("nll", "correct", "targets"), total.tolist(), strict=True))

    def answer(self, prompts: SamplePrompts, feed: ImageFeed | None, told: Callable[[], bool]) -> Answers | None:
        """The greedy answers to all prompts; None and `feed` as of evaluate_held_out."""
        with evaluating(self.model, self.recipe, self.group) as model:

            def next_tokens(
                _: int, batch: Rows, images: Images | None, tokens: np.ndarray, mask: np.ndarray
            ) -> np.ndarray | None:
                found = np.zeros(len(batch))
                (rows,) = self._own_rows(replace(batch, tokens=tokens, loss_mask=mask), images, parts=1)
                found[self.group.rows(len(batch))] = model(**self._prepare_inputs(rows), predicts=True).cpu()
                *ids, stops = self.group.total([*found.tolist(), float(told())])
                return None if stops else np.array(ids, np.int64)

            return prompts.answer(_read(prompts.batches, feed, self.group), next_tokens)

    def get_train_dataloader(self) -> Any:
        """What this process trains on, slice by slice: contiguous rows, as a device's in the JAX backend."""
        micro = self.recipe.train.gradient_accumulation_steps
        for step in range(self.done + 1, self.batches.steps + 1):
            batch = self.batches.batch(step)
            seen = [image for row in batch.images for image in row]
            counts = {
                "targets": int(np.count_nonzero(batch.loss_mask[:, 1:])),
                "real_tokens": int(np.count_nonzero(batch.segments)),
                "images": len(seen),
                "soft_tokens": sum(image.soft_tokens for image in seen),
            }
            self.patches += count_patches(batch, self.group.size * micro)
            images = _take(self.feed)
            for rows in self._own_rows(batch, images):
                yield {"counts": counts, "rows": rows}

    def _own_rows(self, batch: Rows, images: Images | None, parts: int | None = None) -> Iterator[dict[str, Any]]:
        """This process's rows of the batch, by default in as many parts as a step has micro-batches."""
        train, own = self.recipe.train, self.group.rows(len(batch.segments))
        dtype = torch.float32 if train.dtype == "float32" else torch.bfloat16
        for places in np.array_split(np.arange(own.start, own.stop), parts or train.gradient_accumulation_steps):
            some = None if images is None else [images[place - own.start] for place in places]
            yield self._tensors(batch, places, some, dtype)

    def _tensors(self, batch: Rows, places: np.ndarray, images: Images | None, dtype: torch.dtype) -> dict[str, Any]:
        kinds = {"tokens": torch.int64, "positions": torch.int64, "loss_mask": torch.bool}
        rows: dict[str, Any] = {name: torch.from_numpy(getattr(batch, name)[places]).to(kinds[name]) for name in kinds}
        numbers = None
        if images is not None:
            numbers = number_images(batch.tokens[places], images, self._image_token)
            rows |= pad_images(images)
        seen = numbers if self._variant.bidirectional_images else None
        window, device = self._variant.sliding_window, self.group.device
        mask = attention_inputs(self._attention, batch.segments[places], seen, window, device, dtype)
        return rows | {"attention_mask": mask}


def _read(batches: Batches, feed: ImageFeed | None, group: ProcessGroup) -> Iterator[tuple[int, Rows, Images | None]]:
    """Each batch, and the images of this process's rows of it. Raises what any process could not read."""
    for number in range(1, batches.steps + 1):
        if feed and (fault := group.first_fault(feed.fault)):
            raise fault
        yield number, batches.batch(number), _take(feed)


def _take(feed: ImageFeed | None) -> Images | None:
    if feed is None:
        return None
    taken = feed.take()
    assert taken is not None, "no step is left, or the one before has told of a fault"
    return taken[1]


@contextlib.contextmanager
def evaluating(model: nn.Module | None, recipe: Recipe, group: ProcessGroup) -> Iterator[nn.Module]:
    """The trainer's model, without dropout and gradients; it trains again afterwards, also where the block raises."""
    assert model is not None, "a trainer has one"
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(group.device.type, torch.bfloat16, recipe.train.dtype != "float32"):
            yield model
    finally:
        model.train()
        if isinstance(model, FSDPModule):
            # What lies outside layers stays whole until a backward pass: AdamW's state is of the parts alone.
            model.reshard()


class _StepCallback(transformers.TrainerCallback):
    """Seeds a step's dropout, decides whether its update counts, and hands on what it came to."""

    def __init__(self, trainer: TrlTrainer, session: TrainSession, finish: Callable[[StepOutcome], bool]) -> None:
        self._trainer, self._session, self._finish = trainer, session, finish

    def on_step_begin(self, args: Any, state: transformers.TrainerState, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Dropout follows from seed and step, so a resumed run needs no random state."""
        trainer = self._trainer
        self._step = trainer.done + state.global_step + 1
        torch.manual_seed(_mixed(trainer.recipe.seed, self._step, trainer.group.rank))

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Clips, and takes the gradients away where the update does not count: AdamW then leaves all as it is."""
        trainer, highest = self._trainer, self._trainer.recipe.optimizer.max_grad_norm
        norm = trainer.accelerator.clip_grad_norm_(trainer.trained, math.inf if highest is None else highest)
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        stops = self._session.stopping.is_set() or bool(trainer.feed and trainer.feed.fault)
        loss, correct, told = trainer.group.total([*trainer.sums.tolist(), float(stops)])
        trainer.sums.zero_()
        plan = self._session.plan(self._step)
        values = zip((loss, grad_norm), plan.skip_above, strict=True)
        skipped = any(not math.isfinite(value) or value > limit for value, limit in values)
        if skipped:
            trainer.adamw.zero_grad()
        self._outcome = StepOutcome(
            plan=plan,
            loss=loss,
            grad_norm=grad_norm,
            **trainer.counts,
            correct=round(correct),
            skipped=skipped,
            should_stop=told > 0,
        )

    def on_step_end(self, args: Any, state: Any, control: transformers.TrainerControl, **_: Any) -> None:  # noqa: ARG002
        if not self._finish(self._outcome):
            control.should_training_stop = True


def _config(recipe: Recipe, group: ProcessGroup, *, steps: int, folder: Path) -> SFTConfig:
    """Upstream's settings, all that it would do by itself turned off; `folder` is there and stays empty of it."""
    train = recipe.train
    config = SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=train.global_batch_size // (group.size * train.gradient_accumulation_steps),
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        gradient_checkpointing=False,  # the model has it on where the recipe asks
        bf16=train.dtype != "float32",
        max_grad_norm=0.0,  # the callback clips: upstream would not tell it the norm
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        seed=recipe.seed % 2**32,
        use_cpu=group.device.type == "cpu",
        remove_unused_columns=False,
        logging_nan_inf_filter=False,
    )
    config._n_gpu = min(1, config.n_gpu)  # one process, one GPU, however many there are
    return config


def _mixed(seed: int, step: int, rank: int) -> int:
    return int(np.random.SeedSequence([seed % 2**64, step, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))
