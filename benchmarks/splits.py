"""Writes how equal a step's splits are, beside how exact float32 is there, to benchmarks/records/splits.json.

    python benchmarks/splits.py

The gradients of all adapters of random tiny models, for 16 rows of 128 tokens at once, in micro-batches and on several
devices, by the step that training runs, and by transformers + PEFT with torch's autograd. Each matrix' error, relative
to its norm, is against the same library's whole step and against our model in float64. Queries are of norm 1, so
attention is sharp, and errors grow from layer to layer. XLA adds up by the number of its threads, which is at least
that of its devices: one device has four of them here, too.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith import __version__
from gemsmith.arch import find_variant, lora_targets
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.run import host_info
from short import RECORDS, SHORT

RECORD = RECORDS / "splits.json"
VARIANTS = ("tiny-31b",) if SHORT else ("tiny-12b", "tiny-31b", "tiny-e2b", "tiny-26b-a4b")
# Each is a process of its own: what it computes, and on how many devices.
SIDES = {"float64": 1, "gemsmith": 1, "gemsmith, four devices": 4, "transformers": 1}
ROWS, LENGTH, RANK, ALPHA = 16, 128, 4, 8
MICRO_BATCHES = (1, 4) if SHORT else (1, 2, 4, 8, 16)
# What four devices share: for each micro-batch a mesh that its rows can be split over.
MESHES = {1: {"fsdp": 4}} if SHORT else {1: {"fsdp": 4}, 2: {"fsdp": 2, "replica": 2}, 4: {"fsdp": 4}}
PACKAGES = ("jax", "jaxlib", "flax", "qwix", "torch", "transformers", "peft")

Matrices = dict[str, np.ndarray]


def make_batch() -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and which of them are targets: of the rows none to all, never a row's first."""
    random = np.random.default_rng(0)
    tokens = random.integers(108, 1024, (ROWS, LENGTH))
    mask = random.random((ROWS, LENGTH)) < np.linspace(0, 1, ROWS)[:, None]
    mask[:, 0] = False
    return tokens, mask


def make_start(variant: str) -> Matrices:
    """{module.A: (in, R), module.B: (R, out)}, neither of them zero."""
    start: Matrices = {}
    for seed, target in enumerate(lora_targets(find_variant(variant))):
        random, (outputs, inputs) = np.random.default_rng(seed), target.shape
        start[f"{target.module}.A"] = (random.standard_normal((inputs, RANK)) / np.sqrt(inputs)).astype(np.float32)
        start[f"{target.module}.B"] = (random.standard_normal((RANK, outputs)) / 10).astype(np.float32)
    return start


def recipe_of(checkpoint: Path, micro_batches: int, mesh: Any = "auto") -> Recipe:
    return build_recipe(
        {
            "checkpoint": str(checkpoint),
            "data": {"train": "not read", "max_length": LENGTH},
            "lora": {"rank": RANK, "alpha": ALPHA, "dropout": 0.0},
            "optimizer": {"max_grad_norm": None},
            "train": {
                "global_batch_size": ROWS,
                "gradient_accumulation_steps": micro_batches,
                "mesh": mesh,
                "dtype": "float32",
            },
        }
    )


def open_model(checkpoint: Path, variant: str, micro_batches: int, mesh: Any = "auto") -> tuple[Recipe, Any, Any]:
    """The recipe, its mesh, and the adapted model at the start."""
    import jax
    from flax import nnx

    from gemsmith.checkpoints.folder import open_checkpoint
    from gemsmith.train.jax.backend import adapted_model
    from gemsmith.train.jax.mesh import make_mesh

    recipe, opened, start = (
        recipe_of(checkpoint, micro_batches, mesh),
        open_checkpoint(str(checkpoint)),
        make_start(variant),
    )
    devices = make_mesh(recipe, opened.variant)
    model = adapted_model(recipe, opened, devices)
    state = []
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        stack = np.stack([start[name] for name in names_of(opened.variant, path)])
        state.append((path, leaf.replace(jax.device_put(stack, leaf.get_value().sharding))))
    nnx.update(model, nnx.from_flat_state(state))
    return recipe, devices, model


def names_of(variant: Any, path: tuple[Any, ...]) -> list[str]:
    """Names, as of ("layers", 3, "mlp", "up_proj", "kernel_lora_a"): model.language_model.layers.3.mlp.up_proj.A."""
    from gemsmith.models import by_path

    return [f"{tensor.module}.{path[-1][-1].upper()}" for tensor in by_path(variant)[(*path[:-1], "kernel")]]


def by_name(variant: Any, flat: Any) -> Matrices:
    return {
        name: value
        for path, leaf in flat
        for name, value in zip(names_of(variant, path), np.asarray(leaf[...]), strict=True)
    }


def gradients_of_step(checkpoint: Path, variant: str, micro_batches: int, mesh: Any = "auto") -> Matrices:
    """By the step that training runs: Adam's first moments after one, which are 1 - beta1 of the gradient."""
    import jax
    from flax import nnx

    from gemsmith.train.jax.compile import COMPILER_OPTIONS
    from gemsmith.train.jax.distributed import place
    from gemsmith.train.jax.mesh import micro_batches_on
    from gemsmith.train.jax.step import input_shapes, make_optimizer, make_step, shard_opt_state

    recipe, devices, model = open_model(checkpoint, variant, micro_batches, mesh)
    optimizer = nnx.Optimizer(model, make_optimizer(recipe.optimizer), wrt=nnx.LoRAParam)
    nnx.update(optimizer, shard_opt_state(nnx.state(optimizer), model))
    micro_batches = micro_batches_on(recipe, model.variant, devices)
    step = make_step(model, optimizer, lora=recipe.lora, seed=0, micro_batches=micro_batches)
    tokens, mask = make_batch()
    values = {
        "tokens": tokens,
        "segments": np.ones_like(tokens),
        "positions": np.tile(np.arange(LENGTH), (ROWS, 1)),
        "loss_mask": mask,
        "learning_rate": 1e-3,
        "step": 1,
        "skip_above": np.inf,
        "stop": False,
    }
    inputs = {
        name: place(values[name], shape) for name, shape in input_shapes(devices, rows=ROWS, length=LENGTH).items()
    }
    given = (step.trained, step.moments, step.frozen, inputs)
    compiled = step.update.lower(*given).compile(compiler_options=COMPILER_OPTIONS[jax.default_backend()])
    _, moments, _ = compiled(*given)
    flat = [(path[path.index("mu") + 1 :], leaf) for path, leaf in nnx.to_flat_state(moments) if "mu" in path]
    return {name: value / (1 - recipe.optimizer.beta1) for name, value in by_name(model.variant, flat).items()}


def gradients_in_float64(checkpoint: Path, variant: str) -> Matrices:
    """The same model, every float32 of which is a float64; so this process must not do anything else."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64
    from flax import nnx

    from gemsmith.models import token_nll

    _, _, model = open_model(checkpoint, variant, 1)
    graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)  # type: ignore[misc]

    def widened(leaf: Any) -> Any:
        return jnp.asarray(np.asarray(leaf), jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    trained, frozen = jax.tree.map(widened, trained), jax.tree.map(widened, frozen)
    tokens, mask = make_batch()

    def loss(trained: Any) -> jax.Array:
        whole = nnx.merge(graph, trained, frozen)
        for _, module in nnx.iter_modules(whole):
            for name in {"dtype", "param_dtype"} & vars(module).keys():
                setattr(module, name, jnp.float64)
        hidden = whole.hidden(tokens, np.tile(np.arange(LENGTH), (ROWS, 1)), np.ones_like(tokens))
        assert hidden.dtype == jnp.float64
        total, count, _ = token_nll(whole, hidden, jnp.asarray(tokens), jnp.asarray(mask))
        return total / count

    return by_name(model.variant, nnx.to_flat_state(jax.jit(jax.grad(loss))(trained)))


def gradients_of_transformers(checkpoint: Path, variant: str) -> dict[int, Matrices]:
    import peft
    import torch
    import transformers

    names = "|".join(re.escape(target.module) for target in lora_targets(find_variant(variant)))
    base = transformers.AutoModelForImageTextToText.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    )
    model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=f"({names})"))
    start = make_start(variant)
    weights: dict[str, Any] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            module, matrix = re.fullmatch(r"base_model\.model\.(.*)\.lora_([AB])\.default\.weight", name).groups()  # type: ignore[union-attr]
            weights[f"{module}.{matrix}"] = weight
            weight.data = torch.tensor(start[f"{module}.{matrix}"].T.copy())
    tokens, mask = (torch.tensor(array) for array in make_batch())
    found = {}
    for micro_batches in MICRO_BATCHES:
        model.zero_grad()
        for some, targets in zip(tokens.chunk(micro_batches), mask.chunk(micro_batches), strict=True):
            logits = model(input_ids=some).logits[:, :-1][targets[:, 1:]]
            nll = torch.nn.functional.cross_entropy(logits, some[:, 1:][targets[:, 1:]], reduction="sum")
            (nll / mask[:, 1:].sum()).backward()
        found[micro_batches] = {name: weight.grad.numpy().T.copy() for name, weight in weights.items()}
    return found


def main_of_side(side: str, variant: str, checkpoint: Path, out: Path) -> None:
    if side == "float64":
        found = {1: gradients_in_float64(checkpoint, variant)}
    elif SIDES[side] > 1:
        found = {
            micro_batches: gradients_of_step(checkpoint, variant, micro_batches, mesh)
            for micro_batches, mesh in MESHES.items()
        }
    elif side == "gemsmith":
        found = {
            micro_batches: gradients_of_step(checkpoint, variant, micro_batches) for micro_batches in MICRO_BATCHES
        }
    else:
        found = gradients_of_transformers(checkpoint, variant)
    for micro_batches, matrices in found.items():
        np.savez(out / f"{side}-{micro_batches}.npz", allow_pickle=False, **matrices)


def compare(folder: Path) -> dict[str, Any]:
    """Of the worst matrix and of the median one, as {side: {micro-batches: ...}}."""

    def read(side: str, micro_batches: int) -> Matrices:
        return dict(np.load(folder / f"{side}-{micro_batches}.npz"))

    def errors(found: Matrices, expected: Matrices) -> dict[str, float]:
        assert found.keys() == expected.keys()
        each = [float(np.linalg.norm(found[name] - value) / np.linalg.norm(value)) for name, value in expected.items()]
        return {"worst": float(f"{max(each):.2g}"), "median": float(f"{np.median(each):.2g}")}

    exact = read("float64", 1)
    return {
        side: {
            f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}": {
                "off_float64": errors(read(side, micro_batches), exact),
                "off_whole": errors(read(side, micro_batches), read(side.partition(",")[0], 1)),
            }
            for micro_batches in (MICRO_BATCHES if devices == 1 else MESHES)
        }
        for side, devices in SIDES.items()
        if side != "float64"
    }


def main() -> None:
    from tiny_checkpoints import make_checkpoint

    variants: dict[str, Any] = {}
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            checkpoint = make_checkpoint(find_variant(variant), folder / "base", dtype="float32")
            for side, devices in SIDES.items():
                command = [sys.executable, "-W", "ignore", __file__, side, variant, str(checkpoint), temporary]
                flags = f"--xla_force_host_platform_device_count={devices}"
                subprocess.run(
                    command,
                    env=os.environ | {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "4", "XLA_FLAGS": flags},
                    check=True,
                )
            variants[variant] = compare(folder)
        print(variant, json.dumps(variants[variant], indent=1))
    record = {
        "schema_version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "machine": host_info().model_dump(),
        "rows": ROWS,
        "length": LENGTH,
        "variants": variants,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 5:
        main_of_side(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
