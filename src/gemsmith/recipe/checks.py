"""Which keys of a recipe exclude each other."""

import json
import re
from collections.abc import Iterator

from gemsmith.arch import ALL_LINEAR, VISION, Variant, find_variant, lora_targets, variant_of_hub_id, vision_targets
from gemsmith.arch.lora_targets import KINDS
from gemsmith.errors import RecipeError, as_one
from gemsmith.recipe.backends import BACKENDS, NAMES
from gemsmith.recipe.schema import Data, GeneratedData, Lora, Recipe, Train
from gemsmith.recipe.serving import Bench
from gemsmith.tasks import SOURCES, find_source, is_prompt_file

SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")  # a share of data.train as data.eval


def check_recipe(recipe: Recipe) -> None:
    """Raises RecipeError with all that contradicts itself, whatever the model's numbers and the machine."""
    if problems := [RecipeError(message) for check in _CHECKS for message in check(recipe)]:
        raise as_one(problems)


def eval_share(data: Data) -> float | None:
    """The share of data.train that `eval: 5%` asks for; None where data.eval is no share."""
    share = SHARE.fullmatch(data.eval) if isinstance(data.eval, str) else None
    return float(share[1]) / 100 if share else None


def _check_held_out(recipe: Recipe) -> Iterator[str]:
    """A share of the rows is held out of those of data.train alone."""
    data, share = recipe.data, eval_share(recipe.data)
    if share is not None and not 0 < share < 1:
        yield f"data.eval: {data.eval} was given; a share of data.train must be above 0% and below 100%"
    if data.held_out and data.eval != data.train:
        remedy = f"set data.eval to the same rows, or to {100 * data.held_out:g}% alone, or leave held_out out"
        yield f"data.held_out: {data.held_out:g} was given, and data.eval is not data.train; {remedy}"
    if (data.held_out or share) and isinstance(data.train, GeneratedData):
        yield "data.eval: a share of data.train was given, whose rows are made; give rows to make with split: held-out"


def _check_image_folder(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    if data.format != "image-folder":
        for key in ("labels", "prompt"):
            if getattr(data, key):
                yield f"data.{key}: is for data.format image-folder, and {data.format} was given; leave it out"
        return
    if data.columns:
        yield "data.columns: was given, and data.format image-folder has files for rows; leave it out"
    if data.prompt is None:
        yield "data.prompt: is missing; data.format image-folder needs the text that follows each image"
    if not isinstance(data.train, str) or not isinstance(data.eval, str | None):
        yield "data.train: rows to make were given, or several sources; data.format image-folder needs a folder"
    if data.eval == data.train and not data.held_out:
        yield "data.eval: is data.train; set data.held_out to the share to hold out, such as 0.1"


def _check_bench_images(recipe: Recipe) -> Iterator[str]:
    """Requests that are rows are as long as these, and there must be some."""
    bench = recipe.bench
    if not bench.images:
        return
    if recipe.data.eval is None or isinstance(recipe.data.eval, GeneratedData):
        yield "bench.images: true was given, and data.eval names no rows with images; name some, or set it to false"
    if bench.grid != "own":
        remedy = "set bench.grid to own, or bench.images to false"
        yield f"bench.images: true was given, and bench.grid {bench.grid} sends random text of given lengths; {remedy}"
    given, longest = bench.input_tokens, recipe.data.max_length
    if given != Bench.model_fields["input_tokens"].default and (len(given) > 1 or given[0] > longest):
        what = f"requests of bench.images are as long as their rows, of data.max_length {longest} at most"
        yield f"bench.input_tokens: {', '.join(map(str, given))} was given, and {what}; leave it out"


def _check_schedule(recipe: Recipe) -> Iterator[str]:
    """The warm-up is said once; what held-out loss decides needs held-out rows."""
    steps, ratio, train = recipe.optimizer.warmup_steps, recipe.optimizer.warmup_ratio, recipe.train
    if steps is not None and ratio is not None:
        remedy = "set one of them, the other null"
        yield f"optimizer.warmup_steps: {steps} was given, and optimizer.warmup_ratio {ratio:g}; {remedy}"
    if train.eval_steps and recipe.data.eval is None:
        remedy = "set data.eval, such as to 5%, or leave train.eval_steps out"
        yield f"train.eval_steps: {train.eval_steps} was given, and data.eval names no held-out rows; {remedy}"
    for key, without in (("keep", "last"), ("early_stopping_patience", None), ("sample_answers", 0)):
        if not train.eval_steps and (value := getattr(train, key)) != without:
            remedy = f"set that, such as to 50, or leave train.{key} out"
            yield f"train.{key}: {value} was given, and train.eval_steps null, so there is no held-out loss; {remedy}"


def _check_saving(recipe: Recipe) -> Iterator[str]:
    """Checkpoints go where the backend saves; what waits in the host's memory is not saved on the device, too."""
    train, folder = recipe.train, recipe.train.checkpoint_folder or ""
    in_bucket = "://" in folder
    if in_bucket and not folder.startswith("gs://"):
        yield f"train.checkpoint_folder: {folder!r} was given; allowed: a folder, or gs://bucket/folder"
    elif in_bucket and not BACKENDS[train.backend].buckets:
        what = f"train.backend {train.backend} saves to folders only"
        yield f"train.checkpoint_folder: {folder} was given, but {what}; give one that all processes see, or null"
    if train.offload and train.remat == "none":
        remedy = "set it to auto, layer or names of what to save there"
        yield f"train.offload: train.remat is none, which saves all on the device; {remedy}"
    saved = train.remat if isinstance(train.remat, tuple) else ()
    if both := [name for name in train.offload if name in saved]:
        yield f"train.offload: {', '.join(both)} is saved on the device by train.remat; name it in one of them"


def _check_backend(recipe: Recipe) -> Iterator[str]:
    train, name, backend = recipe.train, recipe.train.backend, BACKENDS[recipe.train.backend]
    remat = NAMES if isinstance(train.remat, tuple) else train.remat
    for key, value, allowed in (
        ("attention", train.attention, ("auto", *backend.attentions)),
        ("remat", remat, ("auto", *backend.remats)),
        ("dtype", train.dtype, backend.dtypes),
    ):
        if value not in allowed:
            yield f"train.{key}: {value} was given, train.backend {name} has {', '.join(allowed)}; set one of them"
    for key, reason in backend.lacks.items():
        if (value := getattr(train, key)) != Train.model_fields[key].default:
            others = " or ".join(other for other in BACKENDS if key not in BACKENDS[other].lacks)
            given = value if isinstance(value, str) else json.dumps(value)
            remedy = f"leave it out, or set train.backend to {others}"
            yield f"train.{key}: {given} was given, but train.backend {name} {reason}; {remedy}"
    scales = train.double_quant and "double_quant" not in backend.lacks
    if scales and train.dtype != "nf4":
        yield f"train.double_quant: true was given, and train.dtype {train.dtype}; set nf4, or leave it out"
    elif scales and recipe.export.merge_into == "trained":
        what = "rounds the scales of the weights that are trained on in a way that export does not know"
        remedy = "set export.merge_into to original"
        yield f"export.merge_into: trained was given, and train.double_quant {what}; {remedy}"
    if ALL_LINEAR in recipe.lora.targets and not backend.adapts_all_linear:
        others = " or ".join(other for other in BACKENDS if BACKENDS[other].adapts_all_linear)
        remedy = f"name their kinds, or set train.backend to {others}"
        yield f"lora.targets: {ALL_LINEAR} was given, and train.backend {name} adapts projections alone; {remedy}"


def _check_full(recipe: Recipe) -> Iterator[str]:
    """What is for adapters alone, and a base that has no weights to train."""
    if recipe.train.method != "full":
        return
    given = [f"lora.{key}" for key, value in recipe.lora if value != Lora.model_fields[key].default]
    remedy = "leave them out, such as by --set 'lora={}'" if given else "leave it out"
    given += ["train.init_adapter"] if recipe.train.init_adapter else []
    given += ["serve.weights adapter"] if recipe.serve.weights == "adapter" else []
    if given:
        what = "train.method full trains the weights themselves, and there is no adapter"
        was = f"{', '.join(given)}: {'was' if len(given) == 1 else 'were'} given"
        yield f"{was}, but {what}; {remedy}, or set train.method to lora"
    if recipe.train.dtype in KINDS:
        what = "train.method full trains weights, and a quantized base stays as it is"
        remedy = "set bfloat16 or float32, or train.method to lora"
        yield f"train.dtype: {recipe.train.dtype} was given, but {what}; {remedy}"


def check_served_adapter(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError for adapters of which vLLM would leave out a part, those on what embeds images."""
    if recipe.serve.weights == "adapter" and vision_targets(variant, recipe.lora.targets):
        targets = f"lora.targets {', '.join(recipe.lora.targets)} adapts what embeds images, too"
        what = f"{targets}, and vLLM leaves that part of an adapter out"
        raise RecipeError(f"serve.weights: adapter was given, but {what}; set merged")


def _check_eval_tasks(recipe: Recipe) -> Iterator[str]:
    tasks = recipe.eval.tasks
    for place, task in enumerate(tasks):
        key = f"eval.tasks.{place}"
        if task in tasks[:place]:
            yield f"{key}: is the same as eval.tasks.{tasks.index(task)}; leave one of them out"
        if task.task in SOURCES:
            if task.dataset is None:
                yield f"{key}.dataset: is missing; {task.task} needs the folder that its questions are in"
            prompts = find_source(task.task).PROMPTS
            if task.prompt not in (None, *prompts) and not is_prompt_file(task.prompt):
                allowed = f"{task.task} has {', '.join(prompts)}"
                yield f"{key}.prompt: {task.prompt} was given; {allowed}; set one, or name a file of your own, my.txt"
            continue
        if recipe.data.eval is None:
            remedy = "set data.eval, or take the task out"
            yield f"{key}.task: {task.task} scores held-out rows, but data.eval names none; {remedy}"
        others = sorted(task.model_fields_set - {"task", "max_tokens"})
        if given := [name for name in others if getattr(task, name) not in (None, False)]:
            what = f"{task.task} judges one greedy answer to each held-out row"
            yield f"{key}.{given[0]}: was given, but {what}; leave it out; allowed there: max_tokens"


def _check_model(recipe: Recipe) -> Iterator[str]:
    if recipe.model in (None, "custom"):
        return
    named = variant_of_hub_id(recipe.checkpoint)
    if named and named.name != recipe.model:
        yield f"model: {recipe.model} was given, but checkpoint {recipe.checkpoint} is {named.name}; set one of them"
    # Whether there is a tower, the checkpoint says.
    kinds = [kind for kind in recipe.lora.targets if kind != VISION]
    try:
        variant = find_variant(recipe.model)
        if kinds or not recipe.lora.targets:
            lora_targets(variant, kinds)
    except RecipeError as error:
        yield str(error)


_CHECKS = (
    *(_check_held_out, _check_image_folder, _check_bench_images, _check_schedule, _check_saving),
    *(_check_backend, _check_full, _check_eval_tasks, _check_model),
)
