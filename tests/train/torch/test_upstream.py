"""What transformers, TRL, PEFT and torch still do otherwise than training needs. Where a test fails, upstream has
changed: drop its row in docs/upstream.md, and the code that it names."""

import inspect
import subprocess
import sys
from importlib import metadata

import peft
import pytest
import torch
import transformers
from packaging.requirements import Requirement
from safetensors import SafetensorError
from torch.distributed.elastic.multiprocessing.api import PContext
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, Gemma4VisionPooler
from transformers.models.gemma4_unified import modeling_gemma4_unified
from trl import SFTTrainer


class Broken(torch.nn.Module):
    """One weight, and a loss that is NaN."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, labels=None):
        return {"loss": (self.weight * x).sum() * torch.nan}


@pytest.mark.filterwarnings("ignore")
def test_transformers_updates_from_a_loss_that_is_no_number(tmp_path):
    model, rows = Broken(), [{"x": torch.ones(2), "labels": torch.ones(2)}] * 2
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=1, **options)
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert model.weight.isnan()


def test_transformers_clips_before_a_callback_sees_the_norm():
    assert "on_pre_optimizer_step(self.args, self.state, self.control)" in inspect.getsource(transformers.Trainer)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([3e30, 3e30])
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0).isinf() and weight.grad.tolist() == [0.0, 0.0]


def test_transformers_wraps_for_several_gpus_in_one_process():
    source = inspect.getsource(transformers.Trainer)
    assert "if self.args.n_gpu > 1" in source and "model = nn.DataParallel(model)" in source


def test_transformers_prepares_the_model_by_accelerate():
    source = inspect.getsource(transformers.Trainer._prepare_for_training)
    assert "if self.is_distributed_loading_by_transformers:" in source and "self.accelerator.prepare(" in source


def test_transformers_takes_no_optimizer_beside_its_fsdp():
    source = inspect.getsource(transformers.Trainer._validate_args)
    assert "Passing `optimizers` is not allowed if PyTorch FSDP is enabled." in source


def test_transformers_trains_the_12b_with_another_mask_than_it_generates_with():
    model, whole = (
        modeling_gemma4_unified.Gemma4UnifiedModel,
        modeling_gemma4_unified.Gemma4UnifiedForConditionalGeneration,
    )
    trains, generates = (inspect.getsource(method) for method in (model.forward, whole.create_masks_for_generate))
    assert "create_masks_for_vision_model(" in generates and "create_masks_for_vision_model(" not in trains
    assert "if mm_token_type_ids is not None:" in trains


def test_autocast_pools_in_bfloat16():
    source = inspect.getsource(Gemma4VisionPooler._avg_pool_by_positions)
    assert "weights.transpose(1, 2) @ hidden_states.float()" in source
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_transformers_norm_is_no_single_kernel():
    assert "rms_norm(" not in inspect.getsource(Gemma4RMSNorm.forward)
    assert "torch.pow(" in inspect.getsource(Gemma4RMSNorm._norm)


def test_tunix_holds_safetensors_and_so_transformers_back():
    """transformers wants 0.8 since 5.13, so pip takes 5.12.1, which takes no notice of heads by layer, beside tunix."""
    asked = [Requirement(line) for line in metadata.requires("google-tunix")]
    assert not next(item for item in asked if item.name == "safetensors").specifier.contains("0.8.0")
    assert hasattr(transformers.Gemma4TextConfig, "global_head_dim") == (transformers.__version__ < "5.19")


def test_trl_casts_adapters_of_a_quantised_base():
    assert "param.data = param.data.to(torch.bfloat16)" in inspect.getsource(SFTTrainer.__init__)


def test_trl_looks_at_a_row():
    assert "next(iter(train_dataset))" in inspect.getsource(SFTTrainer.__init__)


def test_peft_casts_the_input_and_scales_the_wide_product():
    source = inspect.getsource(peft.tuners.lora.layer.Linear.forward)
    assert "x = self._cast_input_dtype(x, lora_A.weight.dtype)" in source
    assert "lora_B(lora_A(dropout(x))) * scaling" in source


def test_torch_has_no_fused_attention_without_a_leading_axis():
    query = torch.zeros(2, 128, 16, requires_grad=True)
    chosen = [
        torch._fused_sdp_choice(x, x, x, None, 0.0, True, scale=1.0, enable_gqa=False) for x in (query, query[None])
    ]
    math = int(torch.nn.attention.SDPBackend.MATH)
    assert chosen[0] == math and chosen[1] != math


def test_torch_sums_bfloat16_into_float32_on_cuda_alone():
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError):
        torch.mm(x, x, out_dtype=torch.float32)


def test_torchrun_kills_after_half_a_minute():
    assert inspect.signature(PContext.close).parameters["timeout"].default == 30


WRITE_TOO_MUCH = """
import resource, signal, sys
import numpy as np
from safetensors.numpy import save_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
save_file({"a": np.zeros(8)}, sys.argv[1])
"""


def test_safetensors_says_of_a_full_disk_in_an_error_of_its_own(tmp_path):
    """By a limit on the file's size: safetensors 0.8 would replace /dev/full with a file instead of writing to it."""
    command = [sys.executable, "-c", WRITE_TOO_MUCH, str(tmp_path / "a.safetensors")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "SafetensorError: " in ended.stderr and "File too large" in ended.stderr
    assert not issubclass(SafetensorError, OSError)
