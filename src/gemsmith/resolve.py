"""What the user left out, filled in, each value with its reason. No weights are read, and nothing is asked of the network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemsmith.checkpoint.fetch import is_hub_id
from gemsmith.checkpoint.folder import name_variant, read_config
from gemsmith.errors import RecipeError
from gemsmith.recipe import Derived, Recipe, load_recipe
from gemsmith.zoo import VARIANTS, Variant, find_variant, lora_targets, read_variant, variant_of_hub_id
from gemsmith.zoo.variant import differing_fields


def resolve(recipe: Recipe) -> tuple[Recipe, list[Derived]]:
    """The recipe with every derivable value written out, and the list of those values with their reasons.

    A resolved recipe resolves to itself. Raises RecipeError or CheckpointError where a value cannot be derived or contradicts another.
    """
    derived: list[Derived] = []
    for key in ("checkpoint", "data.train", "data.eval", "data.template", "train.start_adapter", "hardware.catalogue"):
        _make_absolute(recipe, key, derived)
    _make_folder_absolute(recipe, derived)
    _derive_rows_per_step(recipe, derived)
    variant, reason = _find_model(recipe)
    if recipe.model is None:
        derived.append(Derived("model", variant.name, reason))
    lora_targets(variant, recipe.lora.targets)
    if recipe.data.max_length > variant.context:
        raise RecipeError(f"data.max_length: {recipe.data.max_length} was given; {variant.name} reads at most {variant.context} tokens")
    if (recipe.serve.max_model_len or 0) > variant.context:
        raise RecipeError(
            f"serve.max_model_len: {recipe.serve.max_model_len} was given; {variant.name} reads at most {variant.context} tokens"
        )
    if recipe.serve.max_model_len is None:
        derived.append(_max_model_len(recipe, variant))
    return _with_values(recipe, derived), derived


def resolve_file(path: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, list[Derived]]:
    """What `resolve` makes of the recipe in a file."""
    if not path.exists():
        raise RecipeError(f"{path}: is neither a recipe nor a run directory; give one of the two, such as recipes/demo.yaml")
    return resolve(load_recipe(path, overrides))


def recipe_variant(recipe: Recipe) -> Variant:
    """The numbers of a resolved recipe's model."""
    if recipe.model in VARIANTS:
        return find_variant(recipe.model)
    return read_variant(read_config(Path(recipe.checkpoint)))


def _find_model(recipe: Recipe) -> tuple[Variant, str]:
    folder = Path(recipe.checkpoint).expanduser()
    given = None if recipe.model in (None, "custom") else find_variant(recipe.model)
    if folder.is_dir():
        found = name_variant(read_variant(read_config(folder)))
        if given and (differences := differing_fields(given, found)):
            raise RecipeError(
                f"model: {given.name} was given, but checkpoint {folder} is {found.name} ({', '.join(differences[:3])}); leave model out"
            )
        return found, "read from the checkpoint's config.json"
    if given:
        return given, "given"
    if named := variant_of_hub_id(recipe.checkpoint):
        return named, "known from the hub id"
    if is_hub_id(recipe.checkpoint) or "://" in recipe.checkpoint:
        raise RecipeError(f"model: is missing and {recipe.checkpoint} is not here to read it from; set model, such as model=gemma4-31b")
    raise RecipeError(f"checkpoint: {recipe.checkpoint!r} is neither a folder, nor a hub id (owner/name), nor gs://bucket/folder")


def _make_absolute(recipe: Recipe, key: str, derived: list[Derived]) -> None:
    value = _value_at(recipe, key)
    if not isinstance(value, str) or "://" in value or Path(value).is_absolute():
        return
    path = Path(value).expanduser()
    if path.exists():
        derived.append(Derived(key, str(path.resolve()), f"{value}, seen from the folder the run was started in"))


def _make_folder_absolute(recipe: Recipe, derived: list[Derived]) -> None:
    folder = recipe.train.checkpoint_folder
    if folder is not None and "://" not in folder and not Path(folder).is_absolute():
        reason = f"{folder}, seen from the folder the run was started in"
        derived.append(Derived("train.checkpoint_folder", str(Path(folder).expanduser().resolve()), reason))


def _derive_rows_per_step(recipe: Recipe, derived: list[Derived]) -> None:
    """Rows from train.tokens_per_step, where it is given. Raises RecipeError where it is no number of whole rows, or rows say otherwise."""
    train, length = recipe.train, recipe.data.max_length
    if train.tokens_per_step is None:
        return
    rows, rest = divmod(train.tokens_per_step, length)
    if rest or not rows:
        raise RecipeError(f"train.tokens_per_step: {train.tokens_per_step} was given; it must be a multiple of data.max_length, {length}")
    if "rows_per_step" in train.model_fields_set and train.rows_per_step != rows:
        raise RecipeError(
            f"train.tokens_per_step: {train.tokens_per_step} is {rows} rows of {length}, train.rows_per_step is {train.rows_per_step}; "
            "set one of them"
        )
    if train.rows_per_step != rows:
        derived.append(Derived("train.rows_per_step", rows, "train.tokens_per_step / data.max_length"))


def _max_model_len(recipe: Recipe, variant: Variant) -> Derived:
    evaluated = recipe.data.max_length + (recipe.eval.max_tokens if recipe.data.eval is not None else 0)
    wanted = max(evaluated, max(recipe.bench.input_tokens) + recipe.bench.output_tokens)
    reason = f"the longest that eval and bench send and ask for, at most {variant.name}'s {variant.context}"
    return Derived("serve.max_model_len", min(wanted, variant.context), reason)


def _value_at(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _with_values(recipe: Recipe, derived: list[Derived]) -> Recipe:
    values = recipe.model_dump()
    for item in derived:
        *parents, last = item.key.split(".")
        place = values
        for parent in parents:
            place = place[parent]
        place[last] = item.value
    return Recipe.model_validate(values)
