"""Which keys of a recipe exclude each other."""

import json
import re

from gemsmith.arch import ALL_LINEAR, VISION, Variant, find_variant, lora_targets, variant_of_hub_id, vision_targets
from gemsmith.errors import RecipeError
from gemsmith.recipe.backends import BACKENDS, NAMES
from gemsmith.recipe.schema import Data, GeneratedData, Recipe, Train
from gemsmith.recipe.serving import Bench
from gemsmith.tasks import SOURCES, find_source, is_prompt_file

SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")
"""A share of data.train as data.eval."""


def check_recipe(recipe: Recipe) -> None:
    """Raises RecipeError where keys contradict each other, whatever the model's numbers and the machine."""
    _check_held_out(recipe.data)
    if recipe.data.format == "image-folder":
        _check_image_folder(recipe.data)
    elif given := next((key for key in ("labels", "prompt") if getattr(recipe.data, key)), None):
        raise RecipeError(
            f"data.{given}: is for data.format image-folder, and {recipe.data.format} was given; leave it out"
        )
    if recipe.bench.images:
        _check_bench_images(recipe)
    steps, ratio = recipe.optimizer.warmup_steps, recipe.optimizer.warmup_ratio
    if steps is not None and ratio is not None:
        raise RecipeError(
            f"optimizer.warmup_steps: {steps} was given, and optimizer.warmup_ratio {ratio:g}; set one of them, the "
            "other null"
        )
    _check_saving(recipe.train)
    if recipe.train.eval_steps and recipe.data.eval is None:
        raise RecipeError(
            f"train.eval_steps: {recipe.train.eval_steps} was given, and data.eval names no held-out rows; set "
            "data.eval, such as to 5%, or leave train.eval_steps out"
        )
    for key, without in (("keep", "last"), ("early_stopping_patience", None), ("sample_answers", 0)):
        if not recipe.train.eval_steps and (value := getattr(recipe.train, key)) != without:
            raise RecipeError(
                f"train.{key}: {value} was given, and train.eval_steps null, so there is no held-out loss; set that, "
                f"such as to 50, or leave train.{key} out"
            )
    _check_backend(recipe)
    _check_eval_tasks(recipe)
    if recipe.model not in (None, "custom"):
        find_variant(recipe.model)
        named = variant_of_hub_id(recipe.checkpoint)
        if named and named.name != recipe.model:
            raise RecipeError(
                f"model: {recipe.model} was given, but checkpoint {recipe.checkpoint} is {named.name}; set one of them"
            )
        # Whether there is a tower, the checkpoint says.
        kinds = [kind for kind in recipe.lora.targets if kind != VISION]
        if kinds or not recipe.lora.targets:
            lora_targets(find_variant(recipe.model), kinds)


def eval_share(data: Data) -> float | None:
    """The share of data.train that `eval: 5%` asks for; None where data.eval is no share."""
    share = SHARE.fullmatch(data.eval) if isinstance(data.eval, str) else None
    return float(share[1]) / 100 if share else None


def _check_held_out(data: Data) -> None:
    """A share of the rows is held out of those of data.train alone."""
    share = eval_share(data)
    if share is not None and not 0 < share < 1:
        raise RecipeError(f"data.eval: {data.eval} was given; a share of data.train must be above 0% and below 100%")
    if data.held_out and data.eval != data.train:
        raise RecipeError(
            f"data.held_out: {data.held_out:g} was given, and data.eval is not data.train; set data.eval to the same "
            f"rows, or to {100 * data.held_out:g}% alone, or leave held_out out"
        )
    if (data.held_out or share) and isinstance(data.train, GeneratedData):
        raise RecipeError(
            "data.eval: a share of data.train was given, whose rows are made; give rows to make with split: held-out"
        )


def _check_image_folder(data: Data) -> None:
    """What a folder of images needs."""
    if data.columns:
        raise RecipeError("data.columns: was given, and data.format image-folder has files for rows; leave it out")
    if data.prompt is None:
        raise RecipeError("data.prompt: is missing; data.format image-folder needs the text that follows each image")
    if not isinstance(data.train, str) or not isinstance(data.eval, str | None):
        raise RecipeError(
            "data.train: rows to make were given, or several sources; data.format image-folder needs a folder"
        )
    if data.eval == data.train and not data.held_out:
        raise RecipeError("data.eval: is data.train; set data.held_out to the share to hold out, such as 0.1")


def _check_bench_images(recipe: Recipe) -> None:
    """Requests that are rows are as long as these, and there must be some."""
    bench = recipe.bench
    if recipe.data.eval is None or isinstance(recipe.data.eval, GeneratedData):
        raise RecipeError(
            "bench.images: true was given, and data.eval names no rows with images; name some, or set it to false"
        )
    if bench.grid != "own":
        raise RecipeError(
            f"bench.images: true was given, and bench.grid {bench.grid} sends random text of given lengths; set "
            "bench.grid to own, or bench.images to false"
        )
    given, default = bench.input_tokens, Bench.model_fields["input_tokens"].default
    if given != default and (len(given) > 1 or given[0] > recipe.data.max_length):
        raise RecipeError(
            f"bench.input_tokens: {', '.join(map(str, given))} was given, and requests of bench.images are as long "
            f"as their rows, of data.max_length {recipe.data.max_length} at most; leave it out"
        )


def _check_saving(train: Train) -> None:
    """Checkpoints go where the backend saves; what waits in the host's memory is not saved on the device, too."""
    folder = train.checkpoint_folder or ""
    in_bucket = "://" in folder
    if in_bucket and not folder.startswith("gs://"):
        raise RecipeError(f"train.checkpoint_folder: {folder!r} was given; allowed: a folder, or gs://bucket/folder")
    if in_bucket and not BACKENDS[train.backend].buckets:
        raise RecipeError(
            f"train.checkpoint_folder: {folder} was given, but train.backend {train.backend} saves to folders only; "
            "give one that all processes see, or null"
        )
    if train.offload and train.remat == "none":
        raise RecipeError(
            "train.offload: train.remat is none, which saves all on the device; set it to auto, layer or names of what "
            "to save there"
        )
    saved = train.remat if isinstance(train.remat, tuple) else ()
    if both := [name for name in train.offload if name in saved]:
        raise RecipeError(
            f"train.offload: {', '.join(both)} is saved on the device by train.remat; name it in one of them"
        )


def _check_backend(recipe: Recipe) -> None:
    """What one of the backends has not, whatever the machine."""
    train, name, backend = recipe.train, recipe.train.backend, BACKENDS[recipe.train.backend]
    remat = NAMES if isinstance(train.remat, tuple) else train.remat
    for key, value, allowed in (
        ("attention", train.attention, ("auto", *backend.attentions)),
        ("remat", remat, ("auto", *backend.remats)),
        ("dtype", train.dtype, backend.dtypes),
    ):
        if value not in allowed:
            raise RecipeError(
                f"train.{key}: {value} was given, train.backend {name} has {', '.join(allowed)}; set one of them"
            )
    for key, reason in backend.lacks.items():
        if (value := getattr(train, key)) != Train.model_fields[key].default:
            others = " or ".join(other for other in BACKENDS if key not in BACKENDS[other].lacks)
            given = value if isinstance(value, str) else json.dumps(value)
            raise RecipeError(
                f"train.{key}: {given} was given, but train.backend {name} {reason}; leave it out, or set "
                f"train.backend to {others}"
            )
    if train.double_quant and train.dtype != "nf4":
        raise RecipeError(
            f"train.double_quant: true was given, and train.dtype {train.dtype}; set nf4, or leave it out"
        )
    if train.double_quant and recipe.export.merge_into == "trained":
        raise RecipeError(
            "export.merge_into: trained was given, and train.double_quant rounds the scales of the weights that are "
            "trained on in a way that export does not know; set export.merge_into to original"
        )
    if ALL_LINEAR in recipe.lora.targets and not backend.adapts_all_linear:
        others = " or ".join(other for other in BACKENDS if BACKENDS[other].adapts_all_linear)
        raise RecipeError(
            f"lora.targets: {ALL_LINEAR} was given, and train.backend {name} adapts projections alone; name their "
            f"kinds, or set train.backend to {others}"
        )


def check_served_adapter(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError for adapters of which vLLM would leave out a part, those on what embeds images."""
    if recipe.serve.weights == "adapter" and vision_targets(variant, recipe.lora.targets):
        raise RecipeError(
            f"serve.weights: adapter was given, but lora.targets {', '.join(recipe.lora.targets)} adapts what embeds "
            "images, too, and vLLM leaves that part of an adapter out; set merged"
        )


def _check_eval_tasks(recipe: Recipe) -> None:
    tasks = recipe.eval.tasks
    for place, task in enumerate(tasks):
        key = f"eval.tasks.{place}"
        if task in tasks[:place]:
            raise RecipeError(f"{key}: is the same as eval.tasks.{tasks.index(task)}; leave one of them out")
        if task.task in SOURCES:
            if task.dataset is None:
                raise RecipeError(f"{key}.dataset: is missing; {task.task} needs the folder that its questions are in")
            prompts = find_source(task.task).PROMPTS
            if task.prompt not in (None, *prompts) and not is_prompt_file(task.prompt):
                raise RecipeError(
                    f"{key}.prompt: {task.prompt} was given; {task.task} has {', '.join(prompts)}; set one, or name a "
                    "file of your own, my.txt"
                )
            continue
        if recipe.data.eval is None:
            raise RecipeError(
                f"{key}.task: {task.task} scores held-out rows, but data.eval names none; set data.eval, or take "
                "the task out"
            )
        others = sorted(task.model_fields_set - {"task", "max_tokens"})
        if given := [name for name in others if getattr(task, name) not in (None, False)]:
            raise RecipeError(
                f"{key}.{given[0]}: was given, but {task.task} judges one greedy answer to each held-out row; leave it "
                f"out; allowed there: max_tokens"
            )
