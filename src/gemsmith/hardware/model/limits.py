"""What training cannot do on any machine: rows, heads and layouts that do not go together. Backends ask the same."""

import math
from collections.abc import Callable, Mapping
from functools import partial

from gemsmith.arch import Variant, lora_targets, text_tensors
from gemsmith.arch.lora_targets import BLOCK, KINDS, is_quantized
from gemsmith.errors import RecipeError, raise_all
from gemsmith.recipe.backends import BACKENDS, LANES, heads_fill_lanes
from gemsmith.recipe.schema import Mesh, Recipe
from gemsmith.system.format import mesh as name_mesh


def check_training(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError for what is known to fail before there is a machine, or a mesh where that is left to it."""
    train, wanted = recipe.train, recipe.train.mesh
    mesh = Mesh() if wanted == "auto" else wanted
    sizes, checks = mesh.model_dump(), list[Callable[[], object]]([partial(_check_rank, recipe, variant)])
    if train.backend == "trl":
        checks += [partial(trl_mesh, recipe, mesh.replica * mesh.fsdp)]
        checks += [partial(check_trl_quantized, train.dtype, variant)]
    else:
        checks += [partial(check_mesh, recipe, variant, sizes)]
        checks += [partial(check_splash, recipe, variant, sizes)] * (train.attention == "splash")
    raise_all(checks)


def _check_rank(recipe: Recipe, variant: Variant) -> None:
    rank, most = recipe.lora.rank, max(max(each.shape) for each in lora_targets(variant, recipe.lora.targets))
    if rank > most and recipe.train.method == "lora":
        remedy = f"no matrix of {variant.name} with an adapter has more rows or columns than {most}; set that or less"
        raise RecipeError(f"lora.rank: {rank} was given; {remedy}")


def auto_mesh(recipe: Recipe, devices: int, slices: int, *, tp: int = 1) -> Mesh:
    """Replica over slices, fsdp as far as it divides the rows of a slice, the rest over positions."""
    rows = recipe.train.global_batch_size // recipe.train.gradient_accumulation_steps // slices
    in_slice = devices // slices // tp
    fsdp = math.gcd(max(1, rows), in_slice)
    return Mesh(replica=slices, fsdp=fsdp, sequence=in_slice // fsdp, tp=tp)


def check_mesh(recipe: Recipe, variant: Variant, sizes: Mapping[str, int]) -> None:
    """Raises RecipeError unless rows, positions and heads can be split over axes of these sizes."""
    rows, length = recipe.train.global_batch_size, recipe.data.max_length
    micro_batches = recipe.train.gradient_accumulation_steps
    over_rows = micro_batches * sizes["replica"] * sizes["fsdp"]
    if rows % over_rows:
        product = f"{f'micro_batches {micro_batches} × ' if micro_batches > 1 else ''}replica × fsdp = {over_rows}"
        raise RecipeError(
            f"train.global_batch_size: {rows} rows do not divide over {product}; set a multiple of {over_rows}, "
            f"{'fewer train.gradient_accumulation_steps, ' if micro_batches > 1 else ''}or split rows with "
            "train.mesh.sequence"
        )
    if length % sizes["sequence"]:
        raise RecipeError(
            f"data.max_length: {length} does not divide over {sizes['sequence']} devices of a row "
            f"({name_mesh(sizes)}); set a multiple of {sizes['sequence']}, or train.global_batch_size to a multiple of "
            f"{math.prod(sizes.values())}"
        )
    _check_heads(variant, sizes["tp"], "train.mesh.tp:")


def check_splash(recipe: Recipe, variant: Variant, sizes: Mapping[str, int]) -> None:
    """Raises RecipeError for heads and rows that the splash kernel cannot take, split over sequence and tp so far."""
    if not heads_fill_lanes(variant):
        raise RecipeError(
            f"train.attention: the splash kernel takes heads in multiples of {LANES} numbers, {variant.name} has heads "
            f"of {variant.head_dim} and {variant.global_head_dim}; set dense, or auto"
        )
    part = recipe.data.max_length // sizes["sequence"]
    if part % LANES:
        raise RecipeError(
            f"data.max_length: the splash kernel takes rows in multiples of {LANES} positions a device, not {part}; "
            f"set {math.ceil(part / LANES) * LANES * sizes['sequence']}, or train.attention to dense"
        )
    if sizes["sequence"] > 1:
        _check_heads(variant, sizes["sequence"] * sizes["tp"], "train.mesh: sequence × tp of")


def trl_mesh(recipe: Recipe, processes: int) -> Mesh:
    """How the weights lie on so many processes of TRL. Raises RecipeError for what these cannot do."""
    mesh, train, trl = recipe.train.mesh, recipe.train, BACKENDS["trl"]
    if train.dtype in KINDS and processes > 1 and not trl.splits_quantized:
        raise RecipeError(
            f"train.dtype: {train.dtype} trains in one process, {processes} were asked for; set train.mesh to "
            "{fsdp: 1}, or bfloat16"
        )
    if mesh == "auto":
        mesh = Mesh(fsdp=processes)
    if others := [axis for axis, size in mesh.model_dump().items() if size > 1 and axis not in trl.mesh_axes]:
        raise RecipeError(
            f"train.mesh: train.backend trl splits by {' and '.join(trl.mesh_axes)} only; set "
            f"{' and '.join(others)} to 1, or train.backend to tunix"
        )
    if mesh.replica * mesh.fsdp != processes:
        raise RecipeError(
            f"train.mesh: replica {mesh.replica} × fsdp {mesh.fsdp} is not the number of processes, {processes}; set "
            "train.mesh to auto"
        )
    micro_batches = processes * train.gradient_accumulation_steps
    if train.global_batch_size % micro_batches:
        raise RecipeError(
            f"train.global_batch_size: {train.global_batch_size} cannot be split over {processes} processes × "
            f"{train.gradient_accumulation_steps} micro-batches; set a multiple of {micro_batches}"
        )
    return mesh


def check_trl_quantized(dtype: str, variant: Variant) -> None:
    """Raises RecipeError for experts, which bitsandbytes leaves in bfloat16, and rows that its blocks run over."""
    quantized = [tensor for tensor in text_tensors(variant) if dtype in KINDS and is_quantized(tensor)]
    if quantized and variant.experts and not BACKENDS["trl"].quantises_experts:
        fault = f"leaves the experts of {variant.name} in bfloat16"
    elif odd := [tensor.name for tensor in quantized if tensor.shape[-1] % BLOCK]:
        fault = f"has blocks of {BLOCK}, which run over the rows of {odd[0]}"
    else:
        return
    raise RecipeError(
        f"train.dtype: {dtype} was given, but bitsandbytes {fault}; set bfloat16, or train.backend to tunix"
    )


def allowed_tp(variant: Variant) -> list[int]:
    """Values of tp that divide the heads, and the kv heads of every layer or are multiples of them.

    31B: 32 heads, 16 local and 4 global kv heads, so every power of 2 up to 32; beyond 4, global kv heads are copied.
    """
    kv_heads = {variant.kv_heads_of(layer) for layer in range(variant.layers)}
    divisors = (tp for tp in range(1, variant.heads + 1) if variant.heads % tp == 0)
    return [tp for tp in divisors if all(count % tp == 0 or tp % count == 0 for count in kv_heads)]


def _check_heads(variant: Variant, devices: int, key: str) -> None:
    allowed = allowed_tp(variant)
    if devices not in allowed:
        raise RecipeError(
            f"{key} {devices} does not split the {variant.heads} heads of {variant.name} and their kv heads; set "
            f"{', '.join(map(str, allowed))}"
        )
