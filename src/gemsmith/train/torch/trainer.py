"""TRL's SFTTrainer over our packed rows: its loop, with our batches, loss, schedule and decision which steps count.

A step is a function of the recipe and its number, as in the JAX backend: rows, learning rate, dropout. Upstream's loss,
sampler, scheduler, checkpoints and logs are replaced, since each of them would make another run of the same recipe:
- its schedule and its batches follow from a count that starts anew when a run resumes;
- its loss averages over processes unless every one is told the step's number of targets;
- it applies an update whatever the loss is.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

from gemsmith.checkpoints import Checkpoint
from gemsmith.data import Batches, Rows
from gemsmith.recipe.schema import Recipe
from gemsmith.train.loop import Plan, StepOutcome
from gemsmith.train.torch.attention import attention_inputs
from gemsmith.train.torch.distributed import ProcessGroup
from gemsmith.train.torch.images import DecodedImages, Images, count_patches, number_images, pad_images
from gemsmith.train.torch.upstream import NoScheduler, SkippableAdamW

_MODEL_INPUTS = ("tokens", "positions", "loss_mask", "attention_mask", "pixel_values", "image_position_ids")


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """What the trainer asks whoever runs it.

    `plan(step)`: what the step is run with. `finish(outcome)`: logs, saves or raises; returns whether to go on.
    `should_stop()`: whether this process got SIGTERM.
    """

    plan: Callable[[int], Plan]
    finish: Callable[[StepOutcome], bool]
    should_stop: Callable[[], bool]


class TrlTrainer(SFTTrainer):
    """The steps of a run after `done`."""

    def __init__(
        self,
        model: peft.PeftModel,
        recipe: Recipe,
        batches: Batches,
        group: ProcessGroup,
        hooks: Callbacks,
        *,
        done: int,
        attention: str,
        checkpoint: Checkpoint,
        folder: Path,
    ) -> None:
        self._recipe, self.batches, self._group, self._hooks, self._done = recipe, batches, group, hooks, done
        self._attention, self._variant, self._step = attention, checkpoint.variant, done
        self._image_token: int = checkpoint.config.get("image_token_id", -1)
        self.feed: DecodedImages | None = None
        """The images of this process's rows; None where rows are text alone."""
        self.patches = np.zeros(2, np.int64)
        """See images.count_patches: of this attempt's steps."""
        self._sums = torch.zeros((), device=group.device)
        self._pending: StepOutcome | None = None
        config = _config(recipe, group, steps=batches.steps - done, folder=folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint.folder)
        # TRL looks at one row; the loader below gives the others.
        rows = datasets.Dataset.from_list([{"input_ids": batches.rows.tokens[0].tolist()}])
        super().__init__(model, config, train_dataset=rows, processing_class=tokenizer)
        self.model_accepts_loss_kwargs = True  # the loss is a sum over the step's count, so it is not divided again
        self.remove_callback(transformers.PrinterCallback)
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in self.trained:
            weight.data = weight.data.float()  # TRL casts adapters of a quantized base to bfloat16
        optimizer = recipe.optimizer
        self.adamw = SkippableAdamW(
            self.trained,
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=group.device.type == "cuda",
        )

    # What SFTTrainer's loop calls.

    def get_train_dataloader(self) -> Any:
        return _MicroBatches(self)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None: ...  # it already exists

    def create_optimizer(self, model: nn.Module | None = None) -> SkippableAdamW:  # noqa: ARG002 - upstream's signature
        self.optimizer = self.adamw
        return self.adamw

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:  # noqa: ARG002 - upstream's signature
        self.lr_scheduler = NoScheduler()  # type: ignore[assignment]
        return self.lr_scheduler

    def _prepare_for_training(
        self,
        max_steps: int,
        train_dataloader: Any,
        resume_from_checkpoint: Any,  # noqa: ARG002 - upstream's signature
    ) -> tuple[Any, Any]:
        # The model lies on its devices already, split where there are several: nothing is left for accelerate to wrap.
        self.create_optimizer()
        self.create_scheduler(max_steps)
        return self.model, train_dataloader

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> int:  # noqa: ARG002
        return int(batch_samples[0]["counts"]["targets"])

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        assert not return_outputs, "there are no logits"
        count, rounds = max(1, int(num_items_in_batch)), self._recipe.train.dtype != "float32"
        with torch.autocast(self._group.device.type, dtype=torch.bfloat16) if rounds else nullcontext():
            nll = model(**{name: inputs[name] for name in _MODEL_INPUTS if name in inputs})
        self._sums += nll.detach() / count
        # Gradients are averaged over processes, and the count is that of all of them.
        return nll / (count / self._group.size)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:  # noqa: ARG002 - upstream counts parameters at every step
        return 0

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:  # noqa: ARG002 - upstream's signature
        return self._judge()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:  # noqa: ARG002 - upstream's signature
        return self._judge() if grad_norm is None else grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None: ...

    def _judge(self) -> torch.Tensor:
        """Clips, sets the rate, and decides whether the update counts; called once a step's gradients are there."""
        optimizer = self._recipe.optimizer
        gradients = [weight.grad for weight in self.trained if weight.grad is not None]
        norm = _norm(gradients)
        if optimizer.max_grad_norm is not None:
            scale = torch.clamp(optimizer.max_grad_norm / (norm + 1e-6), max=1.0)
            parts = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
            torch._foreach_mul_(parts, scale)
        stops = self._hooks.should_stop() or bool(self.feed and self.feed.fault)
        loss, told = self._group.total([self._sums.item(), float(stops)])
        self._sums.zero_()
        plan, grad_norm = self._hooks.plan(self._step), norm.item()
        for group in self.adamw.param_groups:
            group["lr"] = plan.learning_rate
        self.adamw.skip = not (math.isfinite(loss) and math.isfinite(grad_norm)) or loss > plan.skip_above
        self._pending = StepOutcome(
            plan=plan, loss=loss, grad_norm=grad_norm, **self._counts, skipped=self.adamw.skip, should_stop=told > 0
        )
        return norm

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if inputs["first"]:
            self._step, self._counts = inputs["step"], inputs["counts"]
            # Dropout follows from seed and step, so a resumed run needs no random state.
            torch.manual_seed(_mixed(self._recipe.seed, self._step, self._group.rank))
        return super().training_step(model, inputs, num_items_in_batch)

    def _maybe_log_save_evaluate(self, *_: Any, **__: Any) -> None:
        """Upstream's last word on a step, and once more at the epoch's end."""
        pending, self._pending = self._pending, None
        if pending is not None and not self._hooks.finish(pending):
            self.control.should_training_stop = True

    def micro_batches(self) -> Iterator[dict[str, Any]]:
        """What this process trains on, slice by slice: contiguous rows, as a device's in the JAX backend."""
        train = self._recipe.train
        micro, dtype = train.gradient_accumulation_steps, torch.float32 if train.dtype == "float32" else torch.bfloat16
        for step in range(self._done + 1, self.batches.steps + 1):
            batch = self.batches.batch(step)
            own = self._group.rows(self.batches.global_batch_size)
            seen = [image for row in batch.images for image in row]
            counts = {
                "targets": int(np.count_nonzero(batch.loss_mask[:, 1:])),
                "real_tokens": int(np.count_nonzero(batch.segments)),
                "images": len(seen),
                "soft_tokens": sum(image.soft_tokens for image in seen),
            }
            self.patches += count_patches(batch, self._group.size * micro)
            images = self.feed.take() if self.feed else None
            for number, places in enumerate(np.array_split(np.arange(own.start, own.stop), micro)):
                some = None if images is None else [images[place - own.start] for place in places]
                what = {"step": step, "counts": counts, "first": number == 0}
                yield self._tensors(batch, places, some, dtype) | what

    def _tensors(self, batch: Rows, places: np.ndarray, images: Images | None, dtype: torch.dtype) -> dict[str, Any]:
        device = self._group.device
        kinds = {"tokens": torch.int64, "positions": torch.int64, "loss_mask": torch.bool}
        moved = {name: torch.from_numpy(getattr(batch, name)[places]).to(device, kind) for name, kind in kinds.items()}
        numbers = None
        if images is not None:
            numbers = number_images(batch.tokens[places], images, self._image_token)
            moved |= {name: array.to(device) for name, array in pad_images(images).items()}
        seen = numbers if self._variant.bidirectional_images else None
        window = self._variant.sliding_window
        mask = attention_inputs(self._attention, batch.segments[places], seen, window, device, dtype)
        return moved | {"attention_mask": mask}


def _config(recipe: Recipe, group: ProcessGroup, *, steps: int, folder: Path) -> SFTConfig:
    """Upstream's settings, all that it would do by itself turned off; `folder` is there and stays empty of it."""
    train = recipe.train
    config = SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=train.global_batch_size // (group.size * train.gradient_accumulation_steps),
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        gradient_checkpointing=False,  # the model has it on where the recipe asks
        bf16=False,  # compute_loss casts
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


class _MicroBatches:
    """What upstream takes for a data loader."""

    def __init__(self, trainer: TrlTrainer) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._trainer.micro_batches()


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The global norm, over all processes, of gradients of which this one may hold a part."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _mixed(seed: int, step: int, rank: int) -> int:
    return int(np.random.SeedSequence([seed % 2**64, step, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))
