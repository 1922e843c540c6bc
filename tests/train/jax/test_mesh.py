"""Layouts of devices: what a recipe may ask for, and that any of them computes what one device does."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from gemsmith.arch import find_variant, text_tensors
from gemsmith.errors import RecipeError
from gemsmith.recipe.load import build_recipe
from gemsmith.train.jax.mesh import count_slices, lay_out, make_execution, make_mesh, mesh_sizes
from tiny_checkpoints import make_tokenizer, write_checkpoint

# In a process of its own, in which the processor is four devices. Prints how far each layout's results are from those
# of one device.
SCRIPT = """
import json, sys
import jax, numpy as np
from flax import nnx
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.models import Execution, abstract_model, load_model
from gemsmith.models.sharding import AXES
from gemsmith.recipe.schema import Lora, Optimizer
from gemsmith.train.jax.distributed import place
from gemsmith.train.jax.lora import add_adapters
from gemsmith.train.jax.mesh import lay_out
from gemsmith.train.jax.step import make_optimizer
from gemsmith.train.jax.step import input_shapes, make_step, shard_opt_state

ROWS, LENGTH, LORA = 4, 256, Lora(rank=4, alpha=8.0, dropout=0.0)
checkpoint, random = open_checkpoint(sys.argv[1]), np.random.default_rng(0)
segments = np.repeat([[1, 2, 0], [1, 2, 3]] * 2, [100, 130, 26], axis=1)
values = {
    "tokens": random.integers(108, 1024, (ROWS, LENGTH)),
    "segments": segments,
    "positions": np.concatenate([np.arange(100), np.arange(130), np.arange(26)])[None].repeat(ROWS, 0),
    "loss_mask": (random.random((ROWS, LENGTH)) < 0.5) & (segments > 0) & (np.arange(LENGTH) > 0),
    "learning_rate": 1e-2, "step": 1, "skip_above": np.inf,
}

class OfSlice:
    # A device of the processor that says it is of slice 0 or 1, its odd ones of 1.
    platform, device_kind, process_index = "cpu", "cpu", 0

    def __init__(self, device):
        self.device, self.id, self.slice_index = device, device.id, device.id % 2

def mesh_of(sizes):
    if sizes[0] == 2:
        laid = lay_out([OfSlice(device) for device in jax.devices()], dict(zip(AXES, sizes)))
        return jax.sharding.Mesh(np.vectorize(lambda chip: chip.device)(laid.devices), AXES)
    return jax.sharding.Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), AXES)

def results(sizes, attention="dense", quantized=None):
    mesh = mesh_of(sizes)
    execution = Execution(attention=attention, remat="layer", mesh=mesh)
    abstract = abstract_model(checkpoint.variant, dtype="float32", quantized=quantized, execution=execution)
    base = load_model(checkpoint, abstract)
    model, noise = add_adapters(base, checkpoint.variant, LORA, seed=0), np.random.default_rng(1)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "kernel_lora_b":
            start = 0.1 * noise.standard_normal(leaf.shape).astype(np.float32)
            nnx.update(model, nnx.from_flat_state([(path, leaf.replace(jax.device_put(start,
                                                            leaf.get_value().sharding)))]))
    graph, state = nnx.split(model)
    shapes = input_shapes(mesh, rows=ROWS, length=LENGTH)
    inputs = {name: place((values | {"stop": np.zeros(mesh.size)})[name], shape) for name, shape in shapes.items()}
    texts = [inputs[name] for name in ("tokens", "positions", "segments")]
    logits = np.asarray(jax.jit(lambda state, *texts: nnx.merge(graph, state)(*texts))(state, *texts))[segments > 0]
    optimizer = nnx.Optimizer(model, make_optimizer(Optimizer()), wrt=nnx.LoRAParam)
    nnx.update(optimizer, shard_opt_state(nnx.state(optimizer), model))
    step = make_step(model, optimizer, lora=LORA, seed=0)
    marked = place(np.arange(LENGTH) == np.array([[99], [229], [150], [0]]), shapes["loss_mask"])
    rows = {name: inputs[name] for name in ("tokens", "positions", "segments")} | {"loss_mask": marked}
    following = np.asarray(step.next_tokens(step.trained, step.frozen, rows))
    places = np.flatnonzero(np.asarray(marked)[segments > 0])
    assert (following == logits[places].argmax(axis=-1)).all(), following
    trained, moments, metrics = step.update(step.trained, step.moments, step.frozen, inputs)
    # Adam's first update is the gradient's sign; its first moment is 0.1 of the clipped gradient.
    found = {"/".join(map(str, path)): np.asarray(leaf[...]) for path,
             leaf in nnx.to_flat_state(moments) if "mu" in path}
    found |= {"logits": logits, "next": following}
    return found | {"loss": np.asarray(metrics["loss"]), "norm": np.asarray(metrics["grad_norm"])}

def far(actual, expected):
    norm = np.linalg.norm
    return {name: float(norm(actual[name] - expected[name]) / norm(expected[name])) for name in expected}

one, nf4 = (1, 1, 1, 1), {"quantized": "nf4"}
plain, quantized = results(one), results(one, **nf4)
found = {
    "sequence, splash": far(results((1, 2, 2, 1), "splash-interpret"), plain),
    "tp": far(results((1, 1, 1, 4)), plain),
    "tp, splash": far(results((1, 1, 1, 4), "splash-interpret"), plain),
    "fsdp, nf4": far(results((1, 4, 1, 1), **nf4), quantized),
    "replica of slices": far(results((2, 2, 1, 1)), plain),
}
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Two layers, one local and one global, of four heads; K = V in the global one, of one head for all four."""
    variant, random = replace(
        find_variant("tiny-31b"), name="custom", layers=2, global_every=2, embed_dim=32, ffn=64, heads=4, kv_heads=2,
        global_kv_heads=1,
        head_dim=16, global_head_dim=32,
    ), np.random.default_rng(7)  # fmt: skip
    folder = tmp_path_factory.mktemp("mesh") / "base"
    write_checkpoint(
        variant, {tensor.name: make_weight(tensor, random) for tensor in text_tensors(variant)}, folder, dtype="float32"
    )
    make_tokenizer(folder)
    return folder


def make_weight(tensor, random):
    noise = random.standard_normal(tensor.shape).astype(np.float32)
    if len(tensor.shape) > 1:
        return noise / np.sqrt(tensor.shape[-1])
    # Queries of norm 1 make attention so sharp that fp32 gradients differ by 3e-5 from one order of summation to the
    # next.
    return (0.25 if "q_norm" in tensor.name else 0.9) + 0.1 * noise


@pytest.mark.slow
def test_four_devices_give_the_logits_the_answers_and_the_gradients_of_one(checkpoint):
    """Rows over sequence 2 x fsdp 2; heads over tp 4, with 2 kv heads and 1; a quantized base over fsdp 4; replica 2,
    of devices that call themselves two slices."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT, str(checkpoint)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 5
    for case, errors in found.items():
        # Measured: logits 1e-7 to 4e-7; a matrix' gradient at most 1.2e-6. Dense and splash on one device: 3e-7, and
        # 8e-7.
        assert errors.pop("next") == 0
        assert max(errors.pop(name) for name in ("logits", "loss", "norm")) < 1e-6, case
        assert len(errors) == 26 and max(errors.values()) < 2e-6, (case, errors)


def recipe_of(mesh="auto", rows=8, length=4096, **train):
    values = {"checkpoint": "x", "data": {"train": "x", "max_length": length}}
    return build_recipe(values | {"train": {"mesh": mesh, "global_batch_size": rows, **train}})


@pytest.mark.parametrize(
    ("rows", "devices", "sizes"),
    [
        (8, 8, (1, 8, 1, 1)),
        (16, 8, (1, 8, 1, 1)),
        (2, 8, (1, 2, 4, 1)),
        (1, 4, (1, 1, 4, 1)),
        (12, 8, (1, 4, 2, 1)),
        (3, 1, (1, 1, 1, 1)),
    ],
)
def test_auto_splits_rows_as_far_as_they_go_and_then_their_positions(rows, devices, sizes):
    found = mesh_sizes(recipe_of(rows=rows), find_variant("gemma4-31b"), devices=devices, kind="TPU v5p")
    assert tuple(found.items()) == tuple(zip(("replica", "fsdp", "sequence", "tp"), sizes, strict=True))


def test_what_a_recipe_asks_for_is_taken():
    mesh = {"replica": 2, "fsdp": 2, "sequence": 2, "tp": 4}
    assert mesh_sizes(recipe_of(mesh), find_variant("gemma4-31b"), devices=32, kind="TPU v5p") == mesh


@pytest.mark.parametrize(
    ("recipe", "model", "message"),
    [
        (
            recipe_of({"fsdp": 4}),
            "31b",
            r"train\.mesh: fsdp 4 needs 4 devices, this machine has 8 \(TPU v5p\); set their product to 8",
        ),
        (
            recipe_of({"fsdp": 8}, rows=4),
            "31b",
            r"train\.global_batch_size: 4 rows .* replica × fsdp = 8; set a multiple of 8",
        ),
        (
            recipe_of(rows=1, length=1023),
            "31b",
            r"data\.max_length: 1023 does not divide over 8 devices of a row .* set a multiple of 8",
        ),
        (recipe_of({"fsdp": 1, "tp": 8}), "12b", r"train\.mesh\.tp: "),
        (recipe_of({"tp": 8}), "26b-a4b", None),
        (recipe_of({"tp": 8}), "31b", None),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(recipe, model, message):
    variant = find_variant(f"gemma4-{model}")
    if model == "12b":
        variant = replace(variant, heads=12)
    if message is None:
        assert mesh_sizes(recipe, variant, devices=8, kind="TPU v5p")["tp"] == 8
        return
    with pytest.raises(RecipeError, match=message) as refusal:
        mesh_sizes(recipe, variant, devices=8, kind="TPU v5p")
    assert "\n" not in str(refusal.value)


def test_tp_that_neither_divides_kv_heads_nor_is_a_multiple_is_refused():
    variant = replace(find_variant("gemma4-31b"), heads=24, kv_heads=6, global_kv_heads=6)
    with pytest.raises(RecipeError, match=r"train\.mesh\.tp: 4 does not split the 24 heads .* set 1, 2, 3, 6, 12, 24"):
        mesh_sizes(recipe_of({"tp": 4}), variant, devices=4, kind="TPU v5p")


class FakeChip:
    """What laying out asks of a device. Chips of two slices come mixed, and in the reverse of their order."""

    platform, device_kind, process_index = "fake", "fake", 0

    def __init__(self, number, slice_index):
        self.id, self.slice_index = number, slice_index


FAKE_SLICES = [FakeChip(number, number % 2) for number in reversed(range(8))]


def test_slices_lie_along_replica_alone_in_their_order():
    assert count_slices(FAKE_SLICES) == 2 and count_slices([SimpleNamespace(platform="cpu")] * 4) == 1
    for sizes in ((2, 4, 1, 1), (2, 2, 1, 2), (4, 1, 2, 1)):
        grid = slice_grid(sizes)
        assert grid.shape == sizes
        found = np.vectorize(lambda chip: chip.slice_index)(grid)
        for index, half in enumerate(np.split(found, 2)):
            assert (half == index).all(), sizes


def slice_grid(sizes):
    return lay_out(FAKE_SLICES, dict(zip(("replica", "fsdp", "sequence", "tp"), sizes, strict=True))).devices


@pytest.mark.parametrize(
    ("rows", "devices", "slices", "sizes"),
    [
        (16, 16, 2, (2, 8, 1, 1)),
        (8, 16, 2, (2, 4, 2, 1)),
        (12, 8, 4, (4, 1, 2, 1)),
    ],
)
def test_auto_puts_a_replica_on_every_slice(rows, devices, slices, sizes):
    found = mesh_sizes(recipe_of(rows=rows), find_variant("gemma4-31b"), devices=devices, kind="v6e", slices=slices)
    assert tuple(found.values()) == sizes


def test_a_mesh_that_splits_weights_over_slices_is_refused():
    line = r"^train\.mesh\.replica: 1 is no multiple of this machine's 2 slices, .*; set it to 2, or the mesh to auto$"
    with pytest.raises(RecipeError, match=line):
        mesh_sizes(recipe_of({"fsdp": 8}), find_variant("gemma4-31b"), devices=8, kind="v6e", slices=2)
    with pytest.raises(RecipeError, match=r"^train\.global_batch_size: 3 rows do not divide over replica × fsdp = 2;"):
        mesh_sizes(recipe_of(rows=3), find_variant("gemma4-31b"), devices=8, kind="v6e", slices=2)


def test_splash_is_refused_where_there_is_no_tpu_and_auto_is_dense_there():
    mesh = make_mesh(recipe_of(rows=4), find_variant("gemma4-31b"))
    assert make_execution(recipe_of(rows=4), find_variant("gemma4-31b"), mesh).attention == "dense"
    with pytest.raises(
        RecipeError, match=r"train\.attention: splash is a kernel for TPU, the devices here are cpu; set dense, or auto"
    ):
        make_execution(recipe_of(rows=4, attention="splash"), find_variant("gemma4-31b"), mesh)


def test_splash_is_refused_for_heads_that_its_kernel_cannot_take_and_auto_is_dense_there():
    tpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]), shape={"sequence": 1, "tp": 1})
    recipes = {how: recipe_of(attention=how, remat="layer") for how in ("auto", "splash")}
    assert make_execution(recipes["auto"], find_variant("tiny-31b"), tpu).attention == "dense"
    assert make_execution(recipes["auto"], find_variant("gemma4-e2b"), tpu).attention == "splash"
    with pytest.raises(
        RecipeError,
        match=r"^train\.attention: .* multiples of 128 numbers, tiny-31b has heads of \d+ and \d+; set dense",
    ):
        make_execution(recipes["splash"], find_variant("tiny-31b"), tpu)


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        ("none", "train.remat is none, which saves all on the device; set it to auto"),
        (["q", "gate"], "gate is saved on the device by train.remat; name it in one of them"),
    ],
)
def test_what_is_kept_on_the_device_cannot_be_offloaded(remat, message):
    with pytest.raises(RecipeError, match=rf"^train\.offload: {message}"):
        recipe_of(offload=["gate", "up"], remat=remat)


def test_offloading_is_refused_where_there_is_no_other_memory():
    mesh = make_mesh(recipe_of(rows=4), find_variant("gemma4-31b"))
    with pytest.raises(
        RecipeError, match=r"^train\.offload: the devices here are cpu, whose memory is the host's; leave it out"
    ):
        make_execution(recipe_of(rows=4, offload=["gate"]), find_variant("gemma4-31b"), mesh)


def test_adapters_are_joined_to_their_projections_on_tpu_alone():
    tpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]), shape={"sequence": 1, "tp": 1})
    recipe, variant = recipe_of(rows=4, remat="layer"), find_variant("gemma4-31b")
    assert make_execution(recipe, variant, tpu).optimizations.fuses_lora
    assert not make_execution(recipe, variant, make_mesh(recipe, variant)).optimizations.fuses_lora


def test_with_tuned_off_no_lever_is_left():
    tpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]), shape={"sequence": 1, "tp": 1})
    how = make_execution(recipe_of(rows=4, remat="layer", optimizations="off"), find_variant("gemma4-31b"), tpu)
    assert how.attention == "splash" and not any(asdict(how.optimizations).values())
    full = make_execution(recipe_of(rows=4, remat="layer"), find_variant("gemma4-31b"), tpu)
    assert all(asdict(full.optimizations).values()), "each is on somewhere"


def test_names_of_what_is_offloaded_reach_the_layers():
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]), shape={"sequence": 1, "tp": 1})
    execution = make_execution(recipe_of(offload=["gate"], remat=["q"]), find_variant("gemma4-31b"), mesh)
    assert (execution.offload, execution.remat) == (("gate",), ("q",))


def test_names_of_what_the_backward_pass_keeps_are_checked():
    assert recipe_of(remat=["q", "attended", "lora"]).train.remat == ("q", "attended", "lora")
    with pytest.raises(RecipeError, match=r"train\.remat"):
        recipe_of(remat=["qq"])
