"""What transformers, TRL, PEFT and torch do otherwise than training here needs: the ledger of the TRL backend.

Each entry: what upstream does; what stands here for it; the version that it was seen in, and where; and the test that
fails once upstream has changed, so that the entry and its code can go. transformers, TRL, PEFT, safetensors:
https://github.com/huggingface; torch: https://github.com/pytorch/pytorch.

transformers applies an update whatever the loss is.
    here:  trainer._StepCallback takes the gradients away
    seen:  transformers 5.19.0, transformers/trainer.py
    until: tests/train/torch/test_upstream.py::test_transformers_updates_from_a_loss_that_is_no_number

transformers tells no callback the gradient's norm, and clipping hides one that is beyond float32.
    here:  trainer._StepCallback clips, by accelerate's function
    seen:  transformers 5.19.0, transformers/trainer.py
    until: tests/train/torch/test_upstream.py::test_transformers_clips_before_a_callback_sees_the_norm

transformers spreads one process over all GPUs by DataParallel.
    here:  trainer._config sets _n_gpu
    seen:  transformers 5.19.0, transformers/trainer.py
    until: tests/train/torch/test_upstream.py::test_transformers_wraps_for_several_gpus_in_one_process

transformers prepares the model by accelerate, which would wrap and move what lies on its devices already.
    here:  trainer.TrlTrainer.__init__ says that the model was split when it was loaded
    seen:  transformers 5.19.0, transformers/trainer.py
    until: tests/train/torch/test_upstream.py::test_transformers_prepares_the_model_by_accelerate

transformers takes no optimizer that is given to it where accelerate splits the model by FSDP.
    here:  model.shard
    seen:  transformers 5.19.0, transformers/trainer.py
    until: tests/train/torch/test_upstream.py::test_transformers_takes_no_optimizer_beside_its_fsdp

transformers computes RMSNorm in nine kernels on CUDA, where torch has one.
    here:  normed
    seen:  transformers 5.19.0, transformers/models/gemma4/modeling_gemma4.py
    until: tests/train/torch/test_upstream.py::test_transformers_norm_is_no_single_kernel

transformers lets an image's tokens see each other in global layers of the 12B where it trains, but not where it
generates, and forgets what says so where mm_token_type_ids are not given.
    here:  attention.attention_inputs makes the masks
    seen:  transformers 5.19.0, transformers/models/gemma4_unified/modeling_gemma4_unified.py
    until: tests/train/torch/test_upstream.py::test_transformers_trains_the_12b_with_another_mask_than_it_generates_with

transformers pools patches in float32, which autocast would make bfloat16.
    here:  model._embed_images turns autocast off, adapted_by_itself on again
    seen:  transformers 5.19.0, transformers/models/gemma4/modeling_gemma4.py
    until: tests/train/torch/test_upstream.py::test_autocast_pools_in_bfloat16

transformers before 5.19 reads a config with per_layer_config as one whose heads are 512 wide everywhere.
    here:  check_readable
    seen:  transformers 5.12.1, transformers/models/gemma4/configuration_gemma4.py
    until: tests/train/torch/test_upstream.py::test_tunix_holds_safetensors_and_so_transformers_back

TRL casts the adapters of a quantized base to bfloat16.
    here:  trainer.TrlTrainer.__init__ casts them back
    seen:  trl 1.16.0, trl/trainer/sft_trainer.py, https://github.com/huggingface/peft/issues/2889
    until: tests/train/torch/test_upstream.py::test_trl_casts_adapters_of_a_quantised_base

TRL wants a data set with rows, even where a loader gives the batches.
    here:  trainer.TrlTrainer.__init__ gives it one row
    seen:  trl 1.16.0, trl/trainer/sft_trainer.py
    until: tests/train/torch/test_upstream.py::test_trl_looks_at_a_row

PEFT casts x to float32 before A, and scales the wide product of B instead of the narrow one of A.
    here:  adapted
    seen:  peft 0.21.2, peft/tuners/lora/layer.py
    until: tests/train/torch/test_upstream.py::test_peft_casts_the_input_and_scales_the_wide_product

torch has a fused attention kernel only for inputs with a leading axis.
    here:  attention._attend adds one
    seen:  torch 2.13.0, torch/nn/functional.py
    until: tests/train/torch/test_upstream.py::test_torch_has_no_fused_attention_without_a_leading_axis

torch on CPU sums no bfloat16 matmul into float32.
    here:  model._logits casts first
    seen:  torch 2.13.0, torch/__init__.py
    until: tests/train/torch/test_upstream.py::test_torch_sums_bfloat16_into_float32_on_cuda_alone

torchrun leaves a process that was told to stop 30 s, then kills it in the middle of a save.
    here:  distributed.launch starts processes itself
    seen:  torch 2.13.0, torch/distributed/elastic/multiprocessing/api.py
    until: tests/train/torch/test_upstream.py::test_torchrun_kills_after_half_a_minute

torch's NCCL communicators end together: a process that fails waits for others that wait for it.
    here:  distributed.joined leaves without ending them
    seen:  torch 2.13.0, https://github.com/pytorch/pytorch/pull/119250
    until: tests/train/torch/test_group.py::test_a_process_that_fails_on_a_gpu_does_not_wait_for_the_others (of what
           stands here; upstream's needs two GPUs)

safetensors raises no OSError on a full disk.
    here:  checkpoints.PeftCheckpoints.save uses gemsmith.checkpoints.safetensors
    seen:  safetensors 0.8.0, safetensors/numpy.py
    until: tests/train/torch/test_upstream.py::test_safetensors_says_of_a_full_disk_in_an_error_of_its_own
"""

from typing import Any

import torch
import transformers
from torch.nn.functional import rms_norm

from gemsmith.checkpoints import Checkpoint
from gemsmith.errors import CheckpointError


def check_readable(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a config of transformers 5.19 that an older one reads as with heads of 512."""
    text = checkpoint.config.get("text_config", checkpoint.config)
    if "per_layer_config" in text and hasattr(transformers.Gemma4TextConfig, "global_head_dim"):
        raise CheckpointError(
            f"checkpoint {checkpoint.folder}: its config.json has per_layer_config, which transformers "
            f"{transformers.__version__} does not "
            "read; install 5.19 or newer, or give it global_head_dim and num_global_key_value_heads as the published "
            "config.json has them"
        )


def adapted(self: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Gives x W + scale * dropout(x) A B like PEFT's own.

    PEFT casts x to float32 first, and scales the wide product, not the narrow. The product with B is added where x W
    lies: a new sum would copy x W first. It has two axes, since autograd copies what changes a view.
    """
    flat = x.reshape(-1, x.shape[-1])
    narrow = self.lora_A["default"](self.lora_dropout["default"](flat)) * self.scaling["default"]
    wide, base = self.lora_B["default"].weight, self.base_layer(flat)
    if torch.is_autocast_enabled(x.device.type):
        wide, narrow = wide.to(base.dtype), narrow.to(base.dtype)
    return base.addmm_(narrow, wide.T).view(*x.shape[:-1], -1)


def adapted_by_itself(self: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The same outside autocast, which the float32 matrices of an adapter on a base of bfloat16 need."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.dtype == torch.bfloat16):
        return adapted(self, x)


def normed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Gives what transformers' own norm gives, also in float32 inside, on CUDA in one kernel instead of nine.

    Autocast would turn x, and what comes out, into float32.
    """
    with torch.autocast(x.device.type, enabled=False):
        return rms_norm(x, x.shape[-1:], self.weight if self.with_scale else None, self.eps)
