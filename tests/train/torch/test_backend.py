"""Whole training runs on CPU: what they record, what they start from, and what is refused."""

import json
import shutil
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers
from transformers.quantizers.quantizers_utils import should_convert_module

from gemsmith.arch import find_variant, text_tensors
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import read_peft_adapter
from gemsmith.errors import CheckpointError, MachineError, RecipeError, RunError
from gemsmith.export.stage import export
from gemsmith.hardware.model import limits
from gemsmith.runs.run import is_up_to_date
from gemsmith.train.stage import train
from gemsmith.train.torch.checkpoints import PeftCheckpoints
from gemsmith.train.torch.model import load_base, nf4_config
from gemsmith.train.torch.trainer import TrlTrainer
from gemsmith.verify.stage import verify

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, at import


BACKEND = {"backend": "trl"}


def test_an_export_takes_the_step_that_training_ended_with_and_no_other(trained):
    run, _ = trained
    (run.checkpoints / "6").rename(run.path / "6")
    with pytest.raises(RunError, match="holds 2, 4, and step 6 is what training kept"):
        export(run)
    shutil.copytree(run.checkpoints / "4", run.checkpoints / "6")
    with pytest.raises(RunError, match="6: was saved by another training"):
        export(run)
    assert not run.merged.exists() and not run.adapter.exists()
    shutil.rmtree(run.checkpoints / "6")
    (run.path / "6").rename(run.checkpoints / "6")
    (run.checkpoints / "6").rename(run.checkpoints / "8")
    shutil.copytree(run.checkpoints / "8", run.checkpoints / "6")
    assert export(run).step == 6


def test_a_run_records_every_step_and_counts_its_adapters(whole, read_events, read_steps):
    run, record = whole
    assert is_up_to_date(run, "train") and record.backend == "trl"
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert record.steps[0].learning_rate == 0 and record.steps[2].learning_rate == 1e-2
    assert record.steps[-1].loss < record.steps[0].loss - 0.1
    assert record.adapted == {"q": 2, "k": 2, "v": 1, "o": 2, "gate": 2, "up": 2, "down": 2}
    assert record.last_checkpoint == "checkpoints/6"
    assert record.mesh == {"replica": 1, "fsdp": 1, "sequence": 1, "tp": 1}
    gpu = bool(record.provenance.machine.accelerators)
    kernel = "efficient" if gpu else "flash"  # a GPU's flash kernel takes no float32
    assert record.attention == {
        "sliding_attention": f"documents: torch's {kernel}_attention kernel, head_dim 16",
        "full_attention": f"documents: torch's {kernel}_attention kernel, head_dim 32",
    }
    adapter = read_peft_adapter(run.checkpoints / "6")
    assert record.trained_parameters == sum(pair.a.size + pair.b.size for pair in adapter.modules.values())
    assert record.saves is not None and record.saves.number == 3 and record.saves.s > 0
    assert 3 * 12 * record.trained_parameters <= record.saves.bytes < 3 * 12 * record.trained_parameters + 1000
    assert record.peak_memory_bytes > (1e7 if gpu else 1e8) and record.real_tokens_per_s > 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["2", "4", "6"]
    events = read_events(run)
    assert events["train/loss"] == {step.step: pytest.approx(step.loss) for step in record.steps}
    names = ("loss", "token_accuracy", "grad_norm", "learning_rate", "real_tokens_per_s")
    assert set(events) == {f"train/{name}" for name in names}
    assert [step.loss for step in read_steps(run)] == [step.loss for step in record.steps]


@pytest.mark.slow
def test_a_loss_that_does_not_fall_is_in_the_record(prepared_run):
    record = train(prepared_run(train=BACKEND, optimizer={"learning_rate": 1e-9}))
    assert (
        len(record.warnings) == 1
        and "optimizer.learning_rate, 1e-09, is too low, or 6 steps are too few" in record.warnings[0]
    )
    assert record.critical_warnings == ()


def test_a_checkpoint_is_an_adapter_that_peft_opens(whole, small_checkpoint):
    import peft
    import transformers

    run, _ = whole
    base = transformers.AutoModelForCausalLM.from_pretrained(small_checkpoint, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, run.checkpoints / "6")
    name = "model.language_model.layers.1.self_attn.k_proj"
    weight = model.get_base_model().get_submodule(name).lora_B["default"].weight
    assert np.array_equal(weight.detach().numpy(), read_peft_adapter(run.checkpoints / "6").modules[name].b)
    assert weight.abs().max() > 0


def test_it_is_exported_and_verified_like_any_other(trained):
    run, _ = trained
    export(run)
    assert verify(run).passed


@pytest.mark.slow
def test_micro_batches_change_nothing_but_rounding(prepare, tmp_path):
    keys = {"lora": {"dropout": 0.0}, "train": BACKEND | {"global_batch_size": 3}}
    one, three = (
        train(
            prepare(tmp_path / str(count), **(keys | {"train": keys["train"] | {"gradient_accumulation_steps": count}}))
        )
        for count in (1, 3)
    )
    assert [step.loss for step in three.steps] == pytest.approx([step.loss for step in one.steps], rel=1e-6)
    assert [step.grad_norm for step in three.steps] == pytest.approx([step.grad_norm for step in one.steps], rel=1e-5)


@pytest.mark.slow
def test_computing_a_layer_again_changes_nothing(whole, prepared_run, same_numbers, saved_bytes):
    run = prepared_run(train=BACKEND | {"remat": "layer"})
    assert same_numbers(train(run), whole[1])
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)


@pytest.mark.slow
def test_compiled_layers_compute_the_same(prepare, tmp_path, monkeypatch):
    """As torch.compile cuts them into graphs; what its compiler makes of a graph takes a minute and is its own
    affair."""
    compile_whole = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compile_whole(self, backend="aot_eager", **options)
    )
    keys = BACKEND | {"max_steps": 2}
    plain, compiled = (
        train(prepare(tmp_path / str(value), train=keys | {"compile": value}, lora={"dropout": 0.0}))
        for value in (False, True)
    )
    assert [step.loss for step in compiled.steps] == pytest.approx([step.loss for step in plain.steps], rel=1e-6)


def test_a_base_in_bfloat16_is_trained_with_adapters_in_float32(prepared_run):
    run = prepared_run(train=BACKEND | {"dtype": "bfloat16"})
    record = train(run)
    assert record.steps[-1].loss < record.steps[0].loss - 0.1
    b = read_peft_adapter(run.checkpoints / "6").modules["model.language_model.layers.0.mlp.up_proj"].b
    assert (b != torch.from_numpy(b).bfloat16().float().numpy()).any()


def test_training_starts_from_an_adapter(whole, prepared_run, tmp_path):
    folder = whole[0].checkpoints / "6"
    run = prepared_run(train=BACKEND | {"init_adapter": str(folder), "max_steps": 1}, optimizer={"warmup_steps": 1})
    record = train(run)
    first, last = (
        read_peft_adapter(place).modules["model.language_model.layers.0.mlp.up_proj"]
        for place in (folder, run.checkpoints / "1")
    )
    assert np.array_equal(first.b, last.b) and np.array_equal(first.a, last.a)  # the first update's rate is 0
    assert record.steps[0].loss < whole[1].steps[0].loss - 0.1


def test_a_folder_that_cannot_be_written_is_one_line(prepared_run, monkeypatch):
    """Also where it is one of several processes that finds out."""
    run = prepared_run(train=BACKEND)

    def refused(*_):
        raise PermissionError(13, "Permission denied", "there")

    monkeypatch.setattr(PeftCheckpoints, "save", refused)
    with pytest.raises(
        MachineError, match=r"permission denied \(there\); name another place, or change its permissions"
    ):
        train(run)


def test_checkpoints_of_another_recipe_are_refused(whole, prepare, tmp_path):
    shutil.copytree(whole[0].checkpoints, tmp_path / "saved")
    run = prepare(tmp_path / "run", train=BACKEND | {"checkpoint_folder": str(tmp_path / "saved")}, lora={"rank": 2})
    with pytest.raises(
        RunError, match=r"saved/6: was trained with another recipe: lora.rank was 4 and is 2; set it back"
    ):
        train(run)


def test_checkpoints_of_the_jax_backend_are_refused(prepared_run, tmp_path):
    run, step = prepared_run(train=BACKEND | {"checkpoint_folder": str(tmp_path / "saved")}), tmp_path / "saved" / "9"
    (step / "model_params").mkdir(parents=True)
    (step / "model_params" / "_METADATA").touch()
    (step / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 1}')
    with pytest.raises(RunError, match=r"saved/9: was not saved by train.backend trl; set .* --force"):
        train(run)


def test_training_goes_on_from_the_last_good_step_and_says_so(trained, capfd):
    run, _ = trained
    file = run.checkpoints / "6" / "moments.safetensors"
    for damage in (lambda whole: whole[:100], lambda whole: whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damage(file.read_bytes()))
        run.record_file("train").unlink()
        record = train(run)
        assert record.resumed_at == (4,)
        warning = record.warnings[0]
        assert "/6: is damaged (moments.safetensors is not what was saved); it is kept as 6.damaged" in warning
        assert warning.endswith("and training goes on from step 4") and warning in capfd.readouterr().err
    assert {"6", "6.damaged", "6.damaged1"} <= {folder.name for folder in run.checkpoints.iterdir()}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "train.attention=splash",
            "train.attention: splash was given, train.backend trl has auto, documents, sdpa, eager",
        ),
        (
            "train.remat=[o]",
            "train.remat: a list of results was given, train.backend trl has auto, none, layer; set one of them",
        ),
        ("train.mesh={tp: 2}", "train.mesh: train.backend trl splits by replica and fsdp only"),
        (
            "train.mesh={fsdp: 3}",
            "train.global_batch_size: 2 cannot be split over 3 processes × 1 micro-batches; set a multiple of 3",
        ),
        ("train.dtype=int8", "train.dtype: int8 was given, train.backend trl has bfloat16, float32, nf4"),
        (
            "train.gradient_accumulation_steps=3",
            "train.global_batch_size: 2 cannot be split over 1 processes × 3 micro-batches",
        ),
        ("train.backend=tunix", None),
    ],
)
def test_what_the_backend_has_not_is_one_line(prepared_run, gemsmith, keys, expected):
    run = prepared_run(train=BACKEND | {"attention": "sdpa"})
    code, _, err = gemsmith("train", run.path, "--set", keys)
    assert code == 2 and err.splitlines()[-1].startswith(
        f"error: {expected or 'train.attention: sdpa was given, train.backend tunix has'}"
    )


def test_full_memory_of_a_gpu_is_one_line_with_what_to_lower(prepared_run, gemsmith, monkeypatch):
    """The words are those of torch 2.11 on an H200."""
    said = (
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 130.86 GiB "
        "is free. Including non-PyTorch memory, this process has 792.00 MiB memory in use. Process 6 has 5 GiB in use."
    )

    def step(*_, **__):
        raise torch.OutOfMemoryError(said)

    monkeypatch.setattr(TrlTrainer, "compute_loss", step)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    code, _, err = gemsmith("train", prepared_run(train=BACKEND).path)
    assert code == 2 and err.splitlines()[-1].startswith(
        "error: out of memory on NVIDIA H200: Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.80 GiB of "
        "which 130.86 GiB is free; raise train.gradient_accumulation_steps, lower train.global_batch_size or "
    )


def test_nf4_without_bitsandbytes_is_one_line(prepared_run, gemsmith, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(limits, "BLOCK", 16)  # the base's rows are of 32
    code, _, err = gemsmith("train", prepared_run(train=BACKEND).path, "--set", "train.dtype=nf4")
    assert (
        code == 2
        and "error: train.dtype: nf4 needs bitsandbytes, which is not installed; run: pip install bitsandbytes" in err
    )


def test_nf4_is_held_as_the_jax_backend_holds_it(monkeypatch):
    """Projections alone, their scales not rounded once more, and no experts, which bitsandbytes leaves as they are."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    variant = find_variant("tiny-e2b")
    config = nf4_config(variant)
    assert config.load_in_4bit and config.bnb_4bit_quant_type == "nf4" and not config.bnb_4bit_use_double_quant
    assert nf4_config(variant, double=True).bnb_4bit_use_double_quant
    converted = {
        tensor.role
        for tensor in text_tensors(variant)
        if len(tensor.shape) == 2 and should_convert_module(tensor.module, config.llm_int8_skip_modules)
    }
    assert converted == {"q", "k", "v", "o", "gate", "up", "down"}
    linears = ("vision_tower.encoder.layers.3.mlp.up_proj.linear", "vision_tower.patch_embedder.input_proj")
    linears += ("embed_vision.embedding_projection", "embed_vision.patch_dense")
    assert not any(should_convert_module(f"model.{name}", config.llm_int8_skip_modules) for name in linears)
    with pytest.raises(
        RecipeError,
        match=r"train\.dtype: nf4 was given, but bitsandbytes leaves the experts of tiny-26b-a4b in bfloat16",
    ):
        nf4_config(find_variant("tiny-26b-a4b"))


def test_a_missing_library_is_one_line(prepared_run, gemsmith, monkeypatch):
    for module in ("backend", "trainer"):
        monkeypatch.delitem(sys.modules, f"gemsmith.train.torch.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "trl", None)
    code, _, err = gemsmith("train", prepared_run(train=BACKEND).path)
    assert (
        code == 2
        and "error: train.backend: trl needs trl, which is not installed; run: pip install 'gemsmith[trl]'" in err
    )


def test_a_config_that_this_transformers_does_not_read_is_one_line(
    small_recipe, small_checkpoint, tmp_path, monkeypatch
):
    """From 5.19 on it writes the global layers' heads by layer; 5.12.1, whose config has one width for all of these,
    takes no notice, and says so with a traceback."""
    monkeypatch.setattr(transformers.Gemma4TextConfig, "global_head_dim", 512, raising=False)
    folder = shutil.copytree(small_checkpoint, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    heads = {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": text.pop("num_global_key_value_heads")}
    text["per_layer_config"] = {"1": heads}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"per_layer_config, which transformers .* does not read; install 5\.19 or newer"
    ):
        load_base(small_recipe(), open_checkpoint(str(folder)), "eager", torch.device("cpu"), vision=False)
