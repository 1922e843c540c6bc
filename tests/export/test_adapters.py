import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from gemsmith.arch import VARIANTS, find_variant, lora_targets
from gemsmith.checkpoints.peft import (
    Adapter,
    LoraPair,
    read_peft_adapter,
    shared_projections,
    target_pattern,
    write_peft_adapter,
)
from gemsmith.checkpoints.steps import checkpoint_steps
from gemsmith.errors import CheckpointError, RunError
from gemsmith.export.adapters import delta_norm, find_step, read_run_adapter
from gemsmith.verify.logits import load_model, load_peft
from tiny_checkpoints import text_config

TINY = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b")


def same(one: Adapter, other: Adapter) -> bool:
    return (
        (one.rank, one.alpha, one.rslora) == (other.rank, other.alpha, other.rslora)
        and one.modules.keys() == other.modules.keys()
        and all(np.array_equal(one.modules[name].a, other.modules[name].a) for name in one.modules)
        and all(np.array_equal(one.modules[name].b, other.modules[name].b) for name in one.modules)
    )


def change(adapter: Adapter, module: str, **matrices: np.ndarray) -> Adapter:
    return dataclasses.replace(
        adapter, modules={**adapter.modules, module: dataclasses.replace(adapter.modules[module], **matrices)}
    )


def first(adapter: Adapter) -> str:
    return next(iter(adapter.modules))


@pytest.mark.parametrize("variant", TINY)
def test_the_adapter_of_a_run_is_what_was_saved_for_every_kind_of_model(make_run, adapter_of, variant):
    adapter = adapter_of(variant)
    assert same(read_run_adapter(make_run(variant, steps={3: adapter})), adapter)


def test_a_checkpoint_that_tunix_itself_wrote_is_read(make_run, adapter_of, stacks):
    from flax import nnx
    from tunix.sft.checkpoint_manager import CheckpointManager

    adapter = adapter_of("tiny-12b")
    run = make_run("tiny-12b")
    shutil.rmtree(run.checkpoints)
    model = nnx.Module()
    model.layers = nnx.List([nnx.Module() for _ in find_variant("tiny-12b").stacks])
    for number, (part, projection), a, b in stacks(adapter, "tiny-12b"):
        parent = model.layers[number]
        if not hasattr(parent, part):
            setattr(parent, part, nnx.Module())
        matrices = nnx.Module()
        matrices.kernel_lora_a, matrices.kernel_lora_b = nnx.LoRAParam(a), nnx.LoRAParam(b)
        setattr(getattr(parent, part), projection, matrices)
    manager = CheckpointManager(str(run.checkpoints))
    manager.save(7, model, save_only_lora_params=True, force=True)
    manager.close()
    assert find_step(run) == 7
    assert same(read_run_adapter(run), adapter)


def test_the_last_complete_step_is_taken_and_a_half_written_one_never(make_run, adapter_of):
    early, late = adapter_of("tiny-12b", seed=1), adapter_of("tiny-12b", seed=2)
    run = make_run(steps={10: early, 20: late})
    for name in ("30", "40", "20.orbax-checkpoint-tmp"):
        shutil.copytree(run.checkpoints / "20", run.checkpoints / name)
        (run.checkpoints / name / "commit_success.txt").unlink()
    (run.checkpoints / "30" / "_CHECKPOINT_METADATA").unlink()
    metadata = json.loads((run.checkpoints / "40" / "_CHECKPOINT_METADATA").read_text())
    (run.checkpoints / "40" / "_CHECKPOINT_METADATA").write_text(
        json.dumps(metadata | {"commit_timestamp_nsecs": None})
    )
    assert checkpoint_steps(run.checkpoints) == [10, 20]
    assert same(read_run_adapter(run), late)
    assert same(read_run_adapter(run, 10), early)
    with pytest.raises(RunError, match=r"export\.step: 30 was given, .* holds 10, 20"):
        read_run_adapter(run, 30)


def test_no_checkpoint_names_the_command_that_makes_one(make_run):
    run = make_run(steps={})
    with pytest.raises(RunError, match="run first: gemsmith train"):
        read_run_adapter(run)


def test_missing_and_extra_modules_are_listed(make_run, adapter_of):
    adapter = adapter_of("tiny-12b")
    stack = [f"layers.{layer}.self_attn.{kind}_proj" for layer in find_variant("tiny-12b").stacks[0] for kind in "kq"]
    there = {
        name: pair for name, pair in adapter.modules.items() if name.removeprefix("model.language_model.") not in stack
    }
    less = dataclasses.replace(adapter, modules=there)
    with pytest.raises(CheckpointError, match=rf"{len(stack)} missing \({re.escape(', '.join(sorted(stack)))}\)"):
        read_run_adapter(make_run(steps={1: less}))


def test_modules_that_the_recipe_did_not_ask_for_are_listed(make_run):
    with pytest.raises(CheckpointError, match=r"not asked for \(layers\.0\.mlp\.down_proj.* and \d+ more\)"):
        read_run_adapter(make_run(targets=["q", "k", "v", "o"]))


def test_a_rank_that_contradicts_the_recipe_is_refused(make_run):
    with pytest.raises(
        CheckpointError, match=r"has A \[4, 128\] and B \[64, 4\]; rank 8 .* need \[8, 128\] and \[64, 8\]"
    ):
        read_run_adapter(make_run(rank=8))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused(make_run, adapter_of, value):
    adapter = adapter_of("tiny-12b")
    b = adapter.modules[first(adapter)].b.copy()
    b[3, 1] = value
    with pytest.raises(CheckpointError, match="NaN or infinity in 1 modules"):
        read_run_adapter(make_run(steps={1: change(adapter, first(adapter), b=b)}))


def test_an_adapter_that_would_do_nothing_is_refused(make_run, adapter_of):
    adapter = adapter_of("tiny-12b")
    zero = {name: LoraPair(a=pair.a, b=np.zeros_like(pair.b)) for name, pair in adapter.modules.items()}
    with pytest.raises(CheckpointError, match=r"is all zero in 26 of 26 modules"):
        read_run_adapter(make_run(steps={1: dataclasses.replace(adapter, modules=zero)}))


def test_a_damaged_checkpoint_is_refused_in_one_line(make_run):
    run = make_run()
    for file in (run.checkpoints / "20" / "model_params").rglob("manifest.ocdbt"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is damaged \(Orbax cannot read it, ") as raised:
        read_run_adapter(run)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_a_peft_folder_reads_back_as_it_was_written(adapter_of, tmp_path, prefix, rslora):
    adapter = dataclasses.replace(adapter_of("tiny-e2b", rank=3, alpha=4.5), rslora=rslora)
    names = {name: name.replace("model.language_model.", prefix) for name in adapter.modules}
    write_peft_adapter(adapter, tmp_path / "adapter", "base", class_names=names)
    assert same(read_peft_adapter(tmp_path / "adapter"), adapter)


def test_the_keys_are_those_that_peft_writes(adapter_of, tmp_path):
    from safetensors.numpy import load_file

    write_peft_adapter(adapter_of("tiny-31b"), tmp_path, "base")
    keys = load_file(tmp_path / "adapter_model.safetensors")
    assert keys["base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 128)
    assert len(keys) == 2 * len(lora_targets(find_variant("tiny-31b")))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_target_modules_matches_the_adapted_modules_of_both_classes_and_no_tower(variant):
    modules = [target.module for target in lora_targets(find_variant(variant), ("q", "v", "down"))]
    pattern = target_pattern(modules)
    every = [target.module for target in lora_targets(find_variant(variant))]
    assert [name for name in every if re.fullmatch(pattern, name)] == modules
    text_only = [name.replace("language_model.", "") for name in every]
    assert [name for name in text_only if re.fullmatch(pattern, name)] == [
        name.replace("language_model.", "") for name in modules
    ]
    assert not re.fullmatch(pattern, "model.vision_tower.encoder.layers.0.self_attn.q_proj")
    assert not re.fullmatch(pattern, "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear")


@pytest.mark.parametrize(("variant", "rslora"), [*((name, False) for name in TINY), ("tiny-e2b", True)])
def test_peft_puts_the_adapter_on_the_multimodal_class(tiny_checkpoint, adapter_of, tmp_path, variant, rslora):
    adapter = dataclasses.replace(adapter_of(variant), rslora=rslora)
    write_peft_adapter(adapter, tmp_path, "base")
    tuned = load_peft(
        load_model(tiny_checkpoint(variant, "float32")), tmp_path, adapter
    )  # raises where a matrix differs
    assert tuned.peft_config["default"].r == adapter.rank
    assert tuned.get_submodule(f"base_model.model.{first(adapter)}").scaling == {"default": adapter.scale}


@pytest.mark.parametrize("variant", ["tiny-31b", "tiny-12b"])
@pytest.mark.parametrize("way", ["renamed while loading", "written for the text-only class"])
def test_peft_puts_the_adapter_on_the_text_only_class(adapter_of, tmp_path, variant, way):
    import torch
    import transformers
    from peft import PeftModel

    numbers = find_variant(variant)
    unified = "Unified" if numbers.model_type == "gemma4_unified" else ""
    config = getattr(transformers, f"Gemma4{unified}TextConfig")(**text_config(numbers) | {"dtype": "float32"})
    model = getattr(transformers, f"Gemma4{unified}ForCausalLM")(config)
    adapter = adapter_of(variant)
    mapping = {r"^model\.language_model\.": "model."} if way == "renamed while loading" else None
    names = {} if mapping else {name: name.replace("language_model.", "") for name in adapter.modules}
    write_peft_adapter(adapter, tmp_path, "base", class_names=names)
    tuned = PeftModel.from_pretrained(model, tmp_path, key_mapping=mapping)
    placed = {name: value for name, value in tuned.named_parameters() if ".lora_" in name}
    assert len(placed) == 2 * len(adapter.modules)
    for name, pair in adapter.modules.items():
        stem = f"base_model.model.{name.replace('language_model.', '')}"
        assert torch.equal(placed[f"{stem}.lora_A.default.weight"], torch.from_numpy(pair.a))
        assert torch.equal(placed[f"{stem}.lora_B.default.weight"], torch.from_numpy(pair.b))


@pytest.mark.parametrize(("key", "value"), [("use_dora", True), ("bias", "all"), ("lora_bias", True)])
def test_an_adapter_that_is_more_than_plain_lora_is_refused(adapter_of, tmp_path, key, value):
    write_peft_adapter(adapter_of("tiny-12b"), tmp_path, "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(CheckpointError, match=f"has {key} = .* only plain LoRA"):
        read_peft_adapter(tmp_path)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_adapter_whose_start_changed_the_base_is_refused(adapter_of, tmp_path, start):
    """PEFT takes the first B A off the base, also when it loads such an adapter: W + scale * B A is not what was
    trained."""
    write_peft_adapter(adapter_of("tiny-12b"), tmp_path, "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "orthogonal"}))
    read_peft_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": start}))
    with pytest.raises(
        CheckpointError, match=f'init_lora_weights = "{start}", which changed the base.*path_initial_model'
    ):
        read_peft_adapter(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("r", 5, "says r = 5"), ("r", "4", "must be a whole number"), ("peft_type", "IA3", "LORA")],
)
def test_a_config_that_contradicts_the_tensors_is_refused(adapter_of, tmp_path, key, value, message):
    write_peft_adapter(adapter_of("tiny-12b"), tmp_path, "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(CheckpointError, match=message):
        read_peft_adapter(tmp_path)


def test_a_truncated_adapter_is_refused(adapter_of, tmp_path):
    write_peft_adapter(adapter_of("tiny-12b"), tmp_path, "base")
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(
        CheckpointError, match=r"adapter_model\.safetensors: is \d+ bytes, its header says \d+; it is truncated"
    ):
        read_peft_adapter(tmp_path)


@pytest.mark.parametrize("where", ["values", "header"])
def test_one_flipped_bit_in_an_adapter_is_found(adapter_of, tmp_path, where):
    write_peft_adapter(adapter_of("tiny-12b"), tmp_path, "base")
    file = tmp_path / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000 if where == "values" else 10] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        read_peft_adapter(tmp_path)


def test_a_pickle_is_not_read(adapter_of, tmp_path):
    write_peft_adapter(adapter_of("tiny-12b"), tmp_path, "base")
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"holds adapter_model\.bin, a pickle"):
        read_peft_adapter(tmp_path)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.filterwarnings("ignore:.*rank_pattern.*:UserWarning")
def test_ranks_and_alphas_by_module_become_one_that_gives_the_same_deltas(tiny_checkpoint, tmp_path, rslora):
    """PEFT itself writes the folder, and says what each module adds."""
    import torch
    from peft import LoraConfig, get_peft_model

    names = {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8},
        "alpha_pattern": {"q_proj": 3, "down_proj": 20},
    }
    targets = r"model\.language_model\.layers\.\d+\.(self_attn\.(q|k)_proj|mlp\.(up|down)_proj)"
    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False, use_rslora=rslora, **names)
    model = get_peft_model(load_model(tiny_checkpoint("tiny-12b", "float32")), config)
    model.save_pretrained(tmp_path)
    adapter = read_peft_adapter(tmp_path)
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert adapter.modules.keys() == layers.keys() and len(layers) == 16 and adapter.rank == 8
    for name, layer in layers.items():
        with torch.no_grad():
            expected = layer.get_delta_weight("default").numpy()
        pair = adapter.modules[name]
        np.testing.assert_allclose(adapter.scale * pair.b @ pair.a, expected, atol=1e-5)  # measured: 1e-6


def test_an_adapter_in_bfloat16_is_read(tiny_checkpoint, adapter_of, tmp_path):
    import torch

    adapter, base = adapter_of("tiny-31b"), tiny_checkpoint("tiny-31b", "float32")
    write_peft_adapter(adapter, tmp_path / "float32", str(base))
    model = load_peft(load_model(base), tmp_path / "float32", adapter)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    name = first(adapter)
    expected = torch.from_numpy(adapter.modules[name].b).bfloat16().float().numpy()
    np.testing.assert_array_equal(read_peft_adapter(tmp_path / "half").modules[name].b, expected)


def test_k_is_written_again_for_v_where_vllm_needs_it_and_nobody_else_sees_it(tiny_checkpoint, adapter_of, tmp_path):
    from safetensors.numpy import load_file

    variant, adapter = find_variant("tiny-31b"), adapter_of("tiny-31b")
    write_peft_adapter(adapter, tmp_path, "base", v_of_k=shared_projections(variant))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    stem = "base_model.model.model.language_model.layers.2.self_attn."
    assert np.array_equal(tensors[f"{stem}v_proj.lora_A.weight"], tensors[f"{stem}k_proj.lora_A.weight"])
    assert np.array_equal(tensors[f"{stem}v_proj.lora_B.weight"], tensors[f"{stem}k_proj.lora_B.weight"])
    assert len(tensors) == 2 * (len(adapter.modules) + 2)
    assert same(read_peft_adapter(tmp_path), adapter)
    load_peft(
        load_model(tiny_checkpoint("tiny-31b", "float32")), tmp_path, adapter
    )  # raises where PEFT's modules are not the adapter's


def test_steps_of_the_trl_backend_are_peft_folders(make_run, adapter_of):
    adapter, run = adapter_of("tiny-12b"), make_run(steps={})
    for step, saved in {5: adapter, 6: adapter_of("tiny-12b", alpha=3.0)}.items():
        write_peft_adapter(saved, run.checkpoints / str(step), "base")
        (run.checkpoints / str(step) / "training.json").write_text("{}")
    assert checkpoint_steps(run.checkpoints) == [5, 6]
    assert same(read_run_adapter(run, 5), adapter)
    with pytest.raises(CheckpointError, match="has rank 4 and alpha 3, the recipe 4 and 8"):
        read_run_adapter(run)


def test_the_norm_of_a_delta_is_that_of_the_product(adapter_of):
    adapter = adapter_of("tiny-12b")
    pair = adapter.modules[first(adapter)]
    assert delta_norm(pair, 2.0) == pytest.approx(float(np.linalg.norm(2.0 * pair.b @ pair.a)), rel=1e-6)


def test_reading_an_adapter_logs_nothing(make_run, caplog):
    run = make_run()
    caplog.clear()
    read_run_adapter(run)
    assert not caplog.records
