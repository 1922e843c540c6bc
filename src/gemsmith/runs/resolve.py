"""What the user left out, filled in, each value with its reason; what cannot be, refused. No weights, no network."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gemsmith.arch import VARIANTS, Variant, find_variant, lora_targets, read_variant, variant_of_hub_id
from gemsmith.arch.config import differing_fields, read_vision
from gemsmith.checkpoints.folder import check_scheme, is_hub_id, name_variant, read_config
from gemsmith.errors import RecipeError, as_one, raise_all
from gemsmith.hardware.model.limits import check_training
from gemsmith.recipe.checks import check_served_adapter, eval_share
from gemsmith.recipe.keys import FILE_KEYS, LISTS, value_at
from gemsmith.recipe.load import absolute_path, default_values, load_recipe, plain_values, read_reasons, with_values
from gemsmith.recipe.schema import Recipe, ResolvedValue, eval_tasks, longest_answer
from gemsmith.runs.stages import SERVED, STAGES
from gemsmith.system.files import expanduser

_FIRST_REQUEST = 128
"""What the stage `serve` asks first: a prompt of 40 tokens, a chat template's dozen, and an answer of 64."""
_PROMPT_ROOM = 64  # with less than this left for the prompt, the default of eval.max_tokens is taken to be too much


def derive_lengths(recipe: Recipe, variant: Variant) -> list[ResolvedValue]:
    """The lengths that are not given and whose default has no room in the model, or a given serve.max_model_len.

    serve.max_model_len is among them unless given. Raises nothing: where no length would do, the checks say so.
    """
    limit = min(recipe.serve.max_model_len or variant.context, variant.context)
    of_limit = f"{variant.name}'s {limit} tokens" if limit == variant.context else f"serve.max_model_len, {limit}"
    found = []
    length, answer = recipe.data.max_length, recipe.eval.max_tokens
    if "max_length" not in recipe.data.model_fields_set and length > variant.context:
        reason = f"the default is {length}, {variant.name} reads at most this"
        found.append(ResolvedValue("data.max_length", variant.context, reason))
    found += _cells(with_values(recipe, found), limit, of_limit)
    if eval_tasks(recipe) and "max_tokens" not in recipe.eval.model_fields_set and limit - answer < _PROMPT_ROOM:
        reason = f"the default is {answer}; half of {of_limit}, is left to prompts"
        found.append(ResolvedValue("eval.max_tokens", max(1, limit // 2), reason))
    if recipe.serve.max_model_len is None:
        fitted = with_values(recipe, found)
        evaluated = fitted.data.max_length + longest_answer(fitted)
        wanted = max(_FIRST_REQUEST, evaluated, _longest_cell(fitted))
        reason = f"the longest that eval and bench send and ask for, at most {variant.name}'s {variant.context}"
        found.append(ResolvedValue("serve.max_model_len", min(wanted, variant.context), reason))
    return found


def check_lengths(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError for rows or served texts that are longer than the model reads."""
    remedy = f"{variant.name} reads at most {variant.context} tokens; set {variant.context} or less"
    given = {key: value_at(recipe, key) or 0 for key in ("data.max_length", "serve.max_model_len")}
    told = (f"{key}: {value} was given; {remedy}" for key, value in given.items() if value > variant.context)
    if problems := [*map(RecipeError, told)]:
        raise as_one(problems)


def check_served(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError where the first prompt of serve has no room. The recipe is a resolved one, here and below."""
    limit, needed = recipe.serve.max_model_len or variant.context, min(_FIRST_REQUEST, variant.context)
    if limit < needed:
        remedy = f"the first prompt and answer of serve need {needed}; set that or more"
        raise RecipeError(f"serve.max_model_len: {limit} was given; {remedy}")


def check_cells(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError where a cell of bench is longer than what is served."""
    limit, needed = recipe.serve.max_model_len or variant.context, _longest_cell(recipe)
    if needed <= limit:
        return
    if recipe.bench.grid != "own":
        why = f"sends and asks for {needed} tokens, more than {_name_limit(limit, variant)}"
        remedy = f"set it to own{_or_raise(needed, variant)}"
        raise RecipeError(f"bench.grid: {recipe.bench.grid} {why}; {remedy}")
    longest, output = max(recipe.bench.input_tokens), recipe.bench.output_tokens
    name, otherwise = _name_limit(limit, variant), _or_raise(longest + output, variant)
    if output >= limit:
        raise RecipeError(f"bench.output_tokens: {output} leaves no room for a prompt in {name}; lower it{otherwise}")
    if longest >= limit:
        raise RecipeError(f"bench.input_tokens: {longest} leaves no room for an answer in {name}; lower it{otherwise}")
    given = f"bench.input_tokens: {longest} and bench.output_tokens: {output}"
    raise RecipeError(f"{given} make {longest + output} tokens, more than {name}; lower one of them{otherwise}")


def check_answer(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError where eval's answers leave no room for a prompt."""
    answer, limit = longest_answer(recipe), recipe.serve.max_model_len or variant.context
    if answer >= limit:
        given = [place for place, task in enumerate(recipe.eval.tasks) if task.max_tokens == answer]
        key = f"eval.tasks.{given[0]}.max_tokens" if given else "eval.max_tokens"
        remedy = f"lower it{_or_raise(answer + _PROMPT_ROOM, variant)}"
        raise RecipeError(f"{key}: {answer} leaves no room for a prompt in {_name_limit(limit, variant)}; {remedy}")


def _cells(recipe: Recipe, limit: int, of_limit: str) -> Iterator[ResolvedValue]:
    """Inputs cut to what the output leaves; the output, where inputs are given, to what they leave, else to half."""
    given, inputs, output = recipe.bench.model_fields_set, recipe.bench.input_tokens, recipe.bench.output_tokens
    if recipe.bench.images:
        longest = min(recipe.data.max_length, max(1, limit - output))
        if "input_tokens" not in given and inputs != (longest,):
            reason = "bench.images: a request is a row, no longer than this"
            yield ResolvedValue("bench.input_tokens", (longest,), reason)
        return
    if recipe.bench.grid != "own" or max(inputs) + output <= limit:
        return
    if "output_tokens" not in given:
        room = limit - max(inputs) if "input_tokens" in given else limit // 2
        if room < 1:
            return
        if room < output:
            reason = f"the default is {output}, which leaves too little of {of_limit}, for prompts"
            yield ResolvedValue("bench.output_tokens", room, reason)
        output = min(output, room)
    if "input_tokens" not in given and output < limit:
        fitting = tuple(dict.fromkeys(min(length, limit - output) for length in inputs))
        lengths = " and ".join(map(str, inputs))
        reason = f"the default is {lengths}, bench.output_tokens leaves {limit - output} of {of_limit}"
        yield ResolvedValue("bench.input_tokens", fitting, reason)


def _longest_cell(recipe: Recipe) -> int:
    """The most tokens that a request of bench sends and asks for together."""
    return max(load.input_tokens + load.output_tokens for load in recipe.bench.plan.loads)


def _name_limit(limit: int, variant: Variant) -> str:
    return f"the {limit} that {variant.name} reads" if limit >= variant.context else f"serve.max_model_len: {limit}"


def _or_raise(needed: int, variant: Variant) -> str:
    """The other remedy, where it is one."""
    return f", or set serve.max_model_len to {needed} or more" if needed <= variant.context else ""


_DERIVED_AGAIN = (
    *("data.max_length", "train.global_batch_size", "serve.max_model_len"),
    *("bench.input_tokens", "bench.output_tokens", "eval.max_tokens"),
)
Resolved = tuple[Recipe, list[ResolvedValue]]  # and the reason of each derived value in it


def resolve(recipe: Recipe) -> Resolved:
    """The recipe with every derivable value written out, and the list of those values with their reasons.

    A resolved recipe resolves to itself. Raises RecipeError or CheckpointError where a value cannot be derived or
    contradicts another; what a single stage could not do with them is told by `check_settings`.
    """
    derived = list(absolute_paths(recipe))
    variant, reason = _find_model(recipe)
    if recipe.model is None:
        derived.append(ResolvedValue("model", variant.name, reason))
    derived += derive_lengths(recipe, variant)
    recipe = with_values(recipe, derived)
    rest = list[ResolvedValue]()
    checks = (partial(lora_targets, variant, recipe.lora.targets), partial(check_lengths, recipe, variant))
    raise_all([*checks, lambda: rest.extend(_rows_per_step(recipe))])
    if (share := eval_share(recipe.data)) is not None:
        reason = f"{recipe.data.eval} of data.train, by a hash of each row"
        rest.append(ResolvedValue("data.eval", recipe.data.train, reason))
        rest.append(ResolvedValue("data.held_out", share, reason))
    if recipe.train.method == "full" and "learning_rate" not in recipe.optimizer.model_fields_set:
        reason = "train.method is full; the default, 1e-4, is for adapters"
        rest.append(ResolvedValue("optimizer.learning_rate", 1e-5, reason))
    if "warmup_steps" not in recipe.optimizer.model_fields_set and recipe.optimizer.warmup_ratio is None:
        # The number is known once the data stage has counted the steps.
        reason = "a tenth of all steps, at most 100; training says how many"
        rest.append(ResolvedValue("optimizer.warmup_steps", None, reason))
    return with_values(recipe, rest), derived + rest


def resolve_file(path: Path, overrides: Sequence[str] = (), *, stages: Collection[str] = tuple(STAGES)) -> Resolved:
    """What `resolve` makes of the recipe in a file. Raises RecipeError also for what one of `stages` could not do."""
    if not path.exists():
        remedy = "give one of the two, such as recipes/demo.yaml"
        raise RecipeError(f"{path}: is neither a recipe nor a run directory; {remedy}")
    recipe, derived = resolve(load_recipe(path, overrides))
    check_settings(recipe, stages)
    return recipe, derived


def resolve_again(there: Recipe, file: Path, overrides: Sequence[str], *, used: Callable[[str], bool]) -> Resolved:
    """What `resolve` makes of the resolved recipe that is in a file, with other values for some keys.

    Such a recipe gives every key. What was derived in it, or is the default, is not the user's and gives way to what is
    set now: it is derived again, unless what was made with it stays (`used`) and the model is the same.
    """
    reasons = {item.key for item in read_reasons(file.read_text(encoding="utf-8"))}
    values, defaults = plain_values(there), default_values()
    another_model = any(override.partition("=")[0].strip() in ("checkpoint", "model") for override in overrides)
    ours = {key for key in _DERIVED_AGAIN if key in reasons or values[key] == defaults[key]}
    forget = {key for key in ours if another_model or not used(key)}
    if another_model and "model" in reasons:
        forget.add("model")
    return resolve(load_recipe(file, overrides, forget=forget))


def check_settings(recipe: Recipe, stages: Collection[str] = tuple(STAGES)) -> None:
    """Raises RecipeError where a resolved recipe asks one of the stages for what it cannot do, on whatever machine."""
    variant, served = recipe_variant(recipe), SERVED
    asked = {check_training: ["train"], check_served: served, check_served_adapter: served}
    asked |= {check_cells: ["bench"], check_answer: ["eval"]}
    raise_all(partial(check, recipe, variant) for check, of in asked.items() if not set(of).isdisjoint(stages))


def recipe_variant(recipe: Recipe) -> Variant:
    """The numbers of a resolved recipe's model; what takes images is the checkpoint's own, where that is here."""
    folder = Path(recipe.checkpoint)
    if recipe.model not in VARIANTS:
        return read_variant(read_config(folder))
    variant = find_variant(recipe.model)
    return replace(variant, vision=read_vision(read_config(folder))) if (folder / "config.json").is_file() else variant


def _find_model(recipe: Recipe) -> tuple[Variant, str]:
    check_scheme(recipe.checkpoint)
    folder = expanduser(recipe.checkpoint)
    given = None if recipe.model in (None, "custom") else find_variant(recipe.model)
    if folder.is_dir():
        found = name_variant(read_variant(read_config(folder)))
        if given and (differences := differing_fields(given, found)):
            but = f"checkpoint {folder} is {found.name} ({', '.join(differences[:3])})"
            raise RecipeError(f"model: {given.name} was given, but {but}; leave model out")
        return found, "read from the checkpoint's config.json"
    if given:
        return given, "given"
    if named := variant_of_hub_id(recipe.checkpoint):
        return named, "known from the hub id"
    if is_hub_id(recipe.checkpoint) or "://" in recipe.checkpoint:
        remedy = "set model, such as model=gemma4-31b"
        raise RecipeError(f"model: is missing and {recipe.checkpoint} is not here to read it from; {remedy}")
    allowed = "neither a folder, nor a hub id (owner/name), nor gs://bucket/folder"
    raise RecipeError(f"checkpoint: {recipe.checkpoint!r} is {allowed}")


def absolute_paths(recipe: Recipe) -> Iterator[ResolvedValue]:
    """Files and folders, seen from where the run was started; those in a recipe's file are absolute by now."""
    for key in FILE_KEYS:
        given = value_at(recipe, key)
        if (path := absolute_path(key, given, Path())) not in (None, given):
            yield ResolvedValue(key, path, f"{given}, seen from the folder the run was started in")
    for key, names in LISTS.items():
        if not isinstance(entries := value_at(recipe, key), tuple):
            continue
        placed = tuple(
            entry.model_copy(
                update={
                    name: path
                    for name in names
                    if (path := absolute_path(f"{key}.{name}", getattr(entry, name), Path()))
                }
            )
            for entry in entries
        )
        if placed != entries:
            yield ResolvedValue(key, placed, "files seen from the folder the run was started in")


def place_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe for a file in a folder: where that is another than this one, what is here is named from the root."""
    here = () if folder.resolve() == Path.cwd() else absolute_paths(recipe)
    made = "train.checkpoint_folder"  # by training, so that it need not be here
    kept = (item for item in here if item.key == made or isinstance(item.value, tuple) or os.path.exists(item.value))
    return with_values(recipe, kept)


def _rows_per_step(recipe: Recipe) -> Iterator[ResolvedValue]:
    """Those of train.tokens_per_step, if given. Raises RecipeError where they are not whole, or rows say otherwise."""
    train, length = recipe.train, recipe.data.max_length
    if train.tokens_per_step is None:
        return
    rows, rest = divmod(train.tokens_per_step, length)
    if rest or not rows:
        remedy = f"it must be a multiple of data.max_length, {length}"
        raise RecipeError(f"train.tokens_per_step: {train.tokens_per_step} was given; {remedy}")
    if "global_batch_size" in train.model_fields_set and train.global_batch_size != rows:
        given = f"{train.tokens_per_step} is {rows} rows of {length}"
        batch = f"train.global_batch_size is {train.global_batch_size}"
        raise RecipeError(f"train.tokens_per_step: {given}, {batch}; set one of them")
    if train.global_batch_size != rows:
        yield ResolvedValue("train.global_batch_size", rows, "train.tokens_per_step / data.max_length")
