"""Full fine-tuning here and in transformers + torch, from the same base, fp32."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from gemsmith import load_model as load_model_of
from gemsmith.arch import find_variant, text_tensors, trained_tensors
from gemsmith.arch.tensors import PREFIX
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.errors import CheckpointError, InputError, RecipeError, RunError, VerifyError
from gemsmith.export.adapters import read_run_weights
from gemsmith.export.stage import export
from gemsmith.hardware.model import step_cost
from gemsmith.hardware.model.memory import memory_breakdown, memory_of
from gemsmith.hardware.model.step_time import matmul_flops
from gemsmith.models import Execution, abstract_model, by_path, load_model
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Lora, Mesh, Optimizer
from gemsmith.report.push import push
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import read_record
from gemsmith.train.inputs import load_samples
from gemsmith.train.jax.distributed import place
from gemsmith.train.jax.mesh import lay_out
from gemsmith.train.jax.step import input_shapes, make_optimizer, make_step, shard_opt_state
from gemsmith.train.schedule import learning_rate
from gemsmith.train.stage import train
from gemsmith.verify.stage import verify
from tiny_checkpoints import make_tokenizer, write_checkpoint

ROWS, LENGTH, UPDATES = 2, 80, 6
DEFAULTS = Lora().model_dump(mode="json")
OPTIMIZER = Optimizer(learning_rate=1e-4, warmup_steps=2, weight_decay=0.1, max_grad_norm=1.0)


def make_weight(tensor, random):
    noise = random.standard_normal(tensor.shape).astype(np.float32)
    if len(tensor.shape) > 1:
        return noise / np.sqrt(tensor.shape[-1])
    # Queries of norm 1 make attention so sharp that fp32 gradients, transformers' too, are 4e-5 from those in fp64.
    return (0.25 if "q_norm" in tensor.name else 0.9) + 0.1 * noise


@pytest.fixture(
    scope="module",
    params=[
        "tiny-e2b",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-31b", "tiny-26b-a4b", "tiny-12b")),
    ],
)
def base(request, tmp_path_factory):
    variant, random = find_variant(request.param), np.random.default_rng(7)
    folder = tmp_path_factory.mktemp("full") / variant.name
    tensors = {tensor.name: make_weight(tensor, random) for tensor in text_tensors(variant)}
    write_checkpoint(variant, tensors, folder, dtype="float32")
    make_tokenizer(folder)
    return folder


def make_model(base, *, sizes=(1, 1, 1, 1), dtype="float32", remat="none"):
    axes = ("replica", "fsdp", "sequence", "tp")
    mesh = lay_out(jax.devices()[: int(np.prod(sizes))], dict(zip(axes, sizes, strict=True)))
    checkpoint, execution = open_checkpoint(str(base)), Execution(remat=remat, mesh=mesh)
    return load_model(checkpoint, abstract_model(checkpoint.variant, dtype=dtype, execution=execution, trains=True))


def start(model, micro_batches=1):
    optimizer = nnx.Optimizer(model, make_optimizer(OPTIMIZER), wrt=nnx.LoRAParam)
    nnx.update(optimizer, shard_opt_state(nnx.state(optimizer), model))
    return make_step(model, optimizer, lora=None, seed=0, micro_batches=micro_batches)


def by_name(variant, flat):
    """{the checkpoint's name: the array as the model holds it} of what is stacked for the model's layers."""
    found = {}
    for path, leaf in flat:
        names = [tensor.name for tensor in by_path(variant)[path]]
        values = np.array(leaf[...], np.float32)
        found |= dict(zip(names, values if path[0] == "layers" else [values], strict=True))
    return found


def as_in_files(variant, arrays):
    turned = {
        tensor.name for tensor in text_tensors(variant) if len(tensor.shape) > 1 and "embed_tokens" not in tensor.name
    }
    return {name: np.swapaxes(value, -1, -2) if name in turned else value for name, value in arrays.items()}


def make_inputs(mesh, number):
    random = np.random.default_rng(number)
    tokens, mask = random.integers(108, 1024, (ROWS, LENGTH)), random.random((ROWS, LENGTH)) < 0.4
    mask[0] &= random.random(LENGTH) < 0.3  # rows count by their tokens, not alike
    mask[:, 0] = False
    values = {
        "tokens": tokens,
        "segments": np.ones_like(tokens),
        "positions": np.tile(np.arange(LENGTH), (ROWS, 1)),
        "loss_mask": mask,
        "learning_rate": learning_rate(OPTIMIZER, update=number, updates=UPDATES),
        "step": number + 1,
        "skip_above": np.full(2, np.inf),
        "stop": np.zeros(mesh.size),
    }
    shapes = input_shapes(mesh, rows=ROWS, length=LENGTH)
    return tokens, mask, {name: place(values[name], shape) for name, shape in shapes.items()}


class Reference:
    """Transformers' model with a plain loop of torch, all but what sees images trained."""

    def __init__(self, base):
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            base, attn_implementation="eager", dtype=torch.float32
        )
        self.weights = {
            name: weight for name, weight in self.model.named_parameters() if name.startswith("model.language_model.")
        }
        vectors = [weight for weight in self.weights.values() if weight.ndim < 2]
        matrices = [weight for weight in self.weights.values() if weight.ndim > 1]
        groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0}]
        self.optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate)
        self.scheduler = transformers.get_cosine_schedule_with_warmup(self.optimizer, OPTIMIZER.warmup_steps, UPDATES)

    def update(self, tokens, mask):
        logits = self.model(input_ids=torch.tensor(tokens)).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1][mask[:, 1:]], torch.tensor(tokens[:, 1:][mask[:, 1:]]))
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), OPTIMIZER.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        return loss.item(), norm.item()


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-12)


def test_every_gradient_is_transformers_and_so_are_the_weights_after_updates(base):
    model = make_model(base)
    variant, step, reference = model.variant, start(model), Reference(base)
    assert set(reference.weights) == {tensor.name for tensor in trained_tensors(variant)}
    trained, moments, losses = step.trained, step.moments, []
    for number in range(UPDATES):
        tokens, mask, inputs = make_inputs(model.execution.mesh, number)
        trained, moments, metrics = step.update(trained, moments, step.frozen, inputs)
        theirs = reference.update(tokens, mask)
        losses.append((float(metrics["loss"]), theirs[0]))
        assert float(metrics["grad_norm"]) == pytest.approx(theirs[1], rel=1e-5)
        if number == 0:  # the first moment is 0.1 of the clipped gradient
            first = [(path[3:], leaf) for path, leaf in nnx.to_flat_state(moments) if "mu" in path]
            found = as_in_files(variant, by_name(variant, first))
            errors = {
                name: relative_error(found[name] / 0.1, weight.grad.numpy())
                for name, weight in reference.weights.items()
            }
            assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
    assert [ours for ours, _ in losses] == pytest.approx([theirs for _, theirs in losses], rel=1e-5)
    ours = as_in_files(variant, by_name(variant, nnx.to_flat_state(trained)))
    errors = {name: relative_error(ours[name], weight.detach().numpy()) for name, weight in reference.weights.items()}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("backend", [pytest.param("tunix", marks=pytest.mark.slow), "trl"])
def test_a_run_that_was_stopped_ends_with_the_bytes_of_one_that_was_not(prepare, tmp_path, snapshot, backend):
    keys = {"method": "full", "backend": backend, "max_steps": 4, "save_steps": 1, "save_total_limit": 9}
    runs = [prepare(tmp_path / name, train=keys, lora=DEFAULTS) for name in ("whole", "stopped")]
    records = [train(run) for run in runs]
    # As a kill in step 4 leaves it, and a disk that turned a bit of step 3.
    shutil.rmtree(runs[1].checkpoints / "4")
    files = [file for file in (runs[1].checkpoints / "3").rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    middle = len(content) // 2
    largest.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    runs[1].record_file("train").unlink()
    again = train(runs[1])
    assert again.resumed_at == (2,)
    assert [step.loss for step in again.steps] == [step.loss for step in records[0].steps]
    arrays = [read_run_weights(run, 4) for run in runs]
    assert all(np.array_equal(arrays[0][name], arrays[1][name]) for name in arrays[0])
    assert again.trained_parameters == sum(array.size for array in arrays[0].values()) and again.adapted == {}


@pytest.fixture(scope="module")
def runs(trained_once, tmp_path_factory):
    """A trained run of each backend, of which these tests may change this copy."""
    keys = {"method": "full", "max_steps": 4, "save_steps": 4, "eval_steps": 4, "sample_answers": 2}
    sections = {"data": {"eval": {"task": "verilog", "rows": 4, "split": "held-out"}}}
    sections |= {"optimizer": {"learning_rate": 1e-4, "warmup_steps": 1, "weight_decay": 0.1}, "lora": DEFAULTS}
    backends = {"tunix": {}, "trl": {"gradient_accumulation_steps": 2}}
    found = {}
    for name, more in backends.items():
        run, _ = trained_once(f"full-{name}", train=keys | {"backend": name} | more, **sections)
        found[name] = replace(run, path=shutil.copytree(run.path, tmp_path_factory.mktemp(name) / "run"))
    return found


def test_both_backends_train_the_same_weights(runs):
    ours, theirs = (read_record(run, TrainRecord) for run in runs.values())
    assert [step.loss for step in ours.steps] == pytest.approx([step.loss for step in theirs.steps], rel=1e-5)
    assert [step.grad_norm for step in ours.steps] == pytest.approx([step.grad_norm for step in theirs.steps], rel=1e-4)
    assert ours.trained_parameters == theirs.trained_parameters
    one, other = (read_run_weights(run, 4) for run in runs.values())
    errors = {name: relative_error(other[name], value) for name, value in one.items()}
    assert errors.keys() == other.keys() and max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


def test_answers_while_it_trains_are_those_of_the_weights_that_were_trained(runs):
    for run in runs.values():
        model = transformers.AutoModelForImageTextToText.from_pretrained(run.recipe.checkpoint, dtype=torch.float32)
        with torch.no_grad():
            for name, value in read_run_weights(run, 4).items():
                model.get_parameter(name).copy_(torch.from_numpy(value))
        samples = load_samples(run, open_checkpoint(run.recipe.checkpoint), parts=1, most=9)
        (evaluation,) = read_record(run, TrainRecord).evaluations
        assert evaluation.step == 4 and len(evaluation.answers) == len(samples.lengths) == 2
        for row, length, answer in zip(samples.batches.rows.tokens, samples.lengths, evaluation.answers, strict=True):
            asked = torch.tensor(row[:length]).long()[None]
            how = {"do_sample": False, "max_new_tokens": 64, "eos_token_id": [*samples.stops], "pad_token_id": 0}
            found = model.generate(input_ids=asked, **how)[0, length:].tolist()
            text = samples.tokenizer.decode(found, skip_special_tokens=False)
            assert answer.answer.removesuffix("…") and text.startswith(answer.answer.removesuffix("…"))


def test_matmuls_in_bfloat16_train_weights_in_float32(prepare, tmp_path):
    keys = {"method": "full", "max_steps": 3, "save_steps": 3, "dtype": "bfloat16"}
    losses = []
    for backend in ("tunix", "trl"):
        run = prepare(tmp_path / backend, train=keys | {"backend": backend}, lora=DEFAULTS)
        losses.append([step.loss for step in train(run).steps])
        weights = read_run_weights(run, 3)
        assert all(array.dtype == np.float32 for array in weights.values())
        moved = weights[f"{PREFIX}layers.0.mlp.up_proj.weight"]
        assert not np.array_equal(moved, torch.from_numpy(moved).bfloat16().float().numpy())
    assert losses[0] == pytest.approx(losses[1], rel=5e-3) and losses[0] != losses[1]
    assert losses[0][-1] < losses[0][0]


def test_merged_is_what_was_trained_and_transformers_computes_with_it(runs):
    run = runs["tunix"]
    record, weights = export(run), read_run_weights(run, 4)
    assert record.adapter == () and not run.adapter.exists() and record.merged_tensors == len(weights)
    merged = transformers.AutoModelForImageTextToText.from_pretrained(run.merged, dtype=torch.float32)
    model = transformers.AutoModelForImageTextToText.from_pretrained(run.recipe.checkpoint, dtype=torch.float32)
    tokens = torch.arange(200, 240)[None]
    with torch.no_grad():
        before, after = model(input_ids=tokens).logits, merged(input_ids=tokens).logits
        for name, value in weights.items():
            assert np.array_equal(merged.get_parameter(name).numpy(), value), name
            model.get_parameter(name).copy_(torch.from_numpy(value))
        assert torch.equal(model(input_ids=tokens).logits, after) and not torch.equal(before, after)
    found = verify(run)
    assert found.passed and found.changed_tensors >= len(weights) - 1, found.checks
    assert [check.name for check in found.checks] == ["files", "base", "other files", "tensors", "logits", "loss"]
    assert all(check.passed for check in found.checks) and found.losses.exported < found.losses.base
    assert load_model_of(run).generate("module", max_new_tokens=2) is not None
    with pytest.raises(InputError, match=r"train\.method full makes none; give 'merged'"):
        load_model_of(run, "adapter")
    with pytest.raises(RunError, match=r"train\.method full makes no adapter; add --weights merged"):
        push(run, "hub:me/model")
    for name in (f"{PREFIX}norm.weight", f"{PREFIX}layers.0.layer_scalar"):  # trained, and not
        place = open_checkpoint(str(run.merged)).places[name]
        content = place.file.read_bytes()
        place.file.write_bytes(content[: place.begin] + bytes([content[place.begin] ^ 1]) + content[place.begin + 1 :])
        with pytest.raises(VerifyError, match=f"tensors: {name}"):
            verify(run)
        place.file.write_bytes(content)


def test_a_step_of_trl_is_exported_and_one_that_is_damaged_told(runs):
    run = runs["trl"]
    assert export(run).adapter == ()
    assert verify(run).passed
    file = run.checkpoints / "4" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not what was saved"):
        export(run)
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"rank": 8}}, "lora.rank: was given, but train.method full trains the weights themselves"),
        (
            {"lora": {"rank": 8, "targets": ["q", "v"]}, "serve": {"weights": "adapter"}},
            "lora.rank, lora.targets, serve.weights adapter: were given, but train.method full trains the weights "
            "themselves, and there is no adapter; leave them out, such as by --set 'lora={}', or set train.method",
        ),
        ({"train": {"init_adapter": "a"}}, "train.init_adapter: was given"),
        ({"serve": {"weights": "adapter"}}, "serve.weights adapter: was given"),
        ({"train": {"dtype": "nf4"}}, "train.dtype: nf4 was given, but train.method full trains weights"),
        ({"train": {"dtype": "int8"}}, "a quantized base stays as it is; set bfloat16 or float32"),
    ],
)
def test_what_is_for_adapters_alone_is_refused(sections, message):
    values = {"checkpoint": "base", "data": {"train": "rows.jsonl"}, **sections}
    values["train"] = {"method": "full"} | values.get("train", {})
    with pytest.raises(RecipeError, match=re.escape(message)):
        build_recipe(values)


def test_adapters_at_their_defaults_are_no_contradiction():
    recipe = build_recipe(
        {"checkpoint": "base", "data": {"train": "rows"}, "lora": {"rank": 64}, "train": {"method": "full"}}
    )
    assert recipe.train.method == "full"


@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma4-26b-a4b"])
def test_a_plan_counts_weights_gradients_moments_and_their_products(name):
    values = {"model": name, "checkpoint": "base", "data": {"train": "rows", "max_length": 4096}}
    recipe, variant = build_recipe(values | {"train": {"method": "full"}}), find_variant(name)
    full, lora = step_cost(recipe, variant), step_cost(build_recipe(values), variant)
    trained = sum(tensor.size for tensor in trained_tensors(variant))
    assert full.trained_parameters == trained == full.parameters - variant.layers
    mesh = Mesh(fsdp=4, tp=2)
    memory = memory_of(full, mesh)
    # float32 weight, gradient and two moments, and the bfloat16 copy that matmuls use.
    assert memory.base == 0 and memory.adapters == trained / 8 * 18
    parts = memory_breakdown(full, memory)
    assert "frozen weights" not in parts and parts["trained weights"] == round(trained / 8 * 6)
    per_token = matmul_flops(full) / full.tokens
    weights = full.layer_matmul_parameters + full.head_parameters
    assert per_token == 6 * weights + 2 * full.recomputed_parameters
    assert per_token > (matmul_flops(lora) / lora.tokens) * 1.1


# In a process of its own, in which the processor is four devices. Prints how far a step on a mesh is from that on one
# device, and the largest share of a matrix, or its moments, that a device holds.
ON_A_MESH = """
import sys

import jax
from flax import nnx
from test_full import by_name, make_inputs, make_model, relative_error, start

results = []
for sizes in ((1, 1, 1, 1), (1, 2, 1, 2)):
    model = make_model(sys.argv[1], sizes=sizes, remat="none" if not results else "layer")
    step, mesh = start(model), model.execution.mesh
    trained, moments, metrics = step.update(step.trained, step.moments, step.frozen, make_inputs(mesh, 1)[2])
    flat = [(path[3:], leaf) for path, leaf in nnx.to_flat_state(moments) if "mu" in path]
    results.append((float(metrics["loss"]), by_name(model.variant, flat)))
    if len(results) > 1:
        leaves = [leaf for leaf in jax.tree.leaves((trained, moments)) if leaf.ndim > 2 and leaf.size > 20_000]
        held = max(leaf.addressable_shards[0].data.size / leaf.size for leaf in leaves)
        (loss, one), (other_loss, other) = results[0], results[-1]
        errors = [relative_error(other[name], value) for name, value in one.items()]
        print(abs(loss - other_loss) / loss, max(errors), held)
"""


@pytest.mark.slow
def test_a_mesh_computes_what_one_device_does_and_splits_weights_and_moments(base):
    imported = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": imported}
    command = [sys.executable, "-c", ON_A_MESH, str(base)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        loss, gradient, held = map(float, line.split())
        assert loss < 1e-6 and gradient < 2e-5, line
        assert held <= 0.5, line
    assert len(done.stdout.splitlines()) == 1
