"""Full fine-tuning here and in transformers + torch, from the same base, fp32."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from gemsmith.arch import find_variant, text_tensors, trained_tensors
from gemsmith.checkpoints import open_checkpoint
from gemsmith.models import Execution, hf_names_of, load_model
from gemsmith.recipe.schema import Optimizer
from gemsmith.train.jax.distributed import place
from gemsmith.train.jax.mesh import lay_out
from gemsmith.train.jax.step import input_shapes, make_optimizer, make_step, shard_opt_state
from gemsmith.train.schedule import learning_rate
from tiny_checkpoints import make_tokenizer, write_checkpoint

ROWS, LENGTH, UPDATES = 2, 80, 6
OPTIMIZER = Optimizer(learning_rate=1e-4, warmup_steps=2, weight_decay=0.1, max_grad_norm=1.0)


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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
    return load_model(open_checkpoint(str(base)), dtype=dtype, execution=Execution(remat=remat, mesh=mesh), trains=True)


def start(model, micro_batches=1):
    optimizer = nnx.Optimizer(model, make_optimizer(OPTIMIZER), wrt=nnx.LoRAParam)
    nnx.update(optimizer, shard_opt_state(nnx.state(optimizer), model))
    return make_step(model, optimizer, lora=None, seed=0, micro_batches=micro_batches)


def by_name(variant, flat):
    """{the checkpoint's name: the array as the model holds it} of what is stacked for the model's layers."""
    found = {}
    for path, leaf in flat:
        names = hf_names_of(variant, path)
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


# In a process of its own, in which the processor is four devices. Prints how far a step on a mesh is from that on one
# device, and the largest share of a matrix, or its moments, that a device holds.
ON_A_MESH = """
import sys
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from test_full import by_name, make_inputs, make_model, relative_error, start

results = []
for sizes in ((1, 1, 1, 1), (1, 2, 1, 2), (1, 1, 4, 1)):
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


def test_a_mesh_computes_what_one_device_does_and_splits_weights_and_moments(base):
    here = Path(__file__).parent
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": str(here)}
    command = [sys.executable, "-c", ON_A_MESH, str(base)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        loss, gradient, held = map(float, line.split())
        assert loss < 1e-6 and gradient < 2e-5, line
        assert held <= 0.5, line
    assert len(done.stdout.splitlines()) == 2
