"""The base model of a source as a checkpoint and variant of Gemma 4, and its target modules as kinds of projection."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.arch import LORA_KINDS, VARIANTS, Variant, find_variant, lora_targets, read_variant, variant_of_hub_id
from gemsmith.arch.lora_targets import ALL_LINEAR, VISION, kinds_of
from gemsmith.arch.tensors import PREFIX, vision_tensors
from gemsmith.checkpoints.folder import name_variant, read_config
from gemsmith.errors import RecipeError
from gemsmith.importers.table import Row, Rule, SourceConfig, is_on, row
from gemsmith.recipe.backends import BACKENDS
from gemsmith.system.files import expanduser
from gemsmith.system.patterns import compile_pattern, search

_SIZE = re.compile(r"gemma[-_]?4[-_](e2b|e4b|12b|26b[-_]a4b|31b)(?![0-9a-z])", re.IGNORECASE)
_QUANTISED = re.compile(
    r"(?<![a-z])(bnb|gptq|awq|gguf|nvfp4|fp8|int4|int8|w4a16|w8a8|qat|[48]bit)(?![a-z])", re.IGNORECASE
)
_SUFFIX = "_proj"


@dataclass(frozen=True, kw_only=True)
class Base:
    """`variant` is None where only the user's --set knows.

    `model` is set where the recipe cannot know it from the checkpoint's name.
    """

    checkpoint: str
    variant: Variant | None
    model: str | None = None
    why: str = ""


def find_base(name: Any, where: str, *, model: str | None = None) -> Base:
    """What a source calls its base model.

    Raises RecipeError where that is not known to be a Gemma 4 of plain weights.
    """
    if not isinstance(name, str):
        raise RecipeError(f"{where} is {name!r}; it must be one hub id or folder")
    folder = expanduser(name)
    if (folder / "config.json").is_file():
        variant = name_variant(read_variant(read_config(folder)))
        return Base(checkpoint=name, variant=variant, why=f"a folder of {variant.name}")
    if _QUANTISED.search(name):
        raise RecipeError(
            f"{where} is {name!r}: quantized weights; give the plain ones, such as --set checkpoint={_plain_id(name)}"
        )
    if model is not None:
        return Base(checkpoint=name, variant=find_variant(model), model=model, why=f"{model} by --set")
    if variant_of_id := variant_of_hub_id(name):
        return Base(checkpoint=name, variant=variant_of_id, why=variant_of_id.name)
    if size := _SIZE.search(name):
        found = VARIANTS[f"gemma4-{size[1].lower().replace('_', '-')}"]
        return Base(checkpoint=name, variant=found, model=found.name, why=f"{found.name} by its name")
    raise RecipeError(
        f"{where} is {name!r}: not known as a Gemma 4; --set model=gemma4-12b says that it is a copy of that one, "
        "--set checkpoint=google/gemma-4-12B-it ports the other settings onto that one"
    )


def _plain_id(name: str) -> str:
    size = _SIZE.search(name)
    known = VARIANTS[f"gemma4-{size[1].lower().replace('_', '-')}"].hub_ids if size else ()
    instructed = [hub_id for hub_id in known if hub_id.endswith("-it") == ("-it" in name.lower())]
    return (instructed or ["google/gemma-4-31B-it"])[0]


def base_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the key that names the base model."""
    if value is None:
        return row(reading, key, value, "none", "not set")
    if "checkpoint" in reading.overridden:
        return row(reading, key, value, "set", "--set checkpoint names another")
    model = reading.variant.name if reading.variant and "model" in reading.overridden else None
    base = find_base(value, f"{reading.file}: {key}", model=model)
    if base.model is not None and "model" not in reading.overridden:
        return row(reading, key, value, "derived", base.why, checkpoint=base.checkpoint, model=base.model)
    return row(reading, key, value, "mapped", base.why, checkpoint=base.checkpoint)


def targets_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of target modules.

    They are a list of names, a regular expression of whole names, or a word for all linear layers.
    """
    if value is None:
        return row(
            reading, key, value, "derived", "PEFT's own for Gemma 4: q_proj and v_proj", lora__targets=["q", "v"]
        )
    # TRL reads a list of one as that one.
    alone = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(alone, str) and alone.lower() in ("all-linear", "all", "all_linear"):
        return _all_linear(key, value, reading)
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise RecipeError(f"{reading.file}: {key} is {value!r}; it must be names of modules or one regular expression")
    if len(names) == 1 and not re.fullmatch(r"[\w.]+", names[0]):
        return _by_expression(key, names[0], reading, value)
    return _by_names(key, names, reading, value)


def comma_targets(key: str, value: Any, reading: SourceConfig) -> Row:
    """As targets_rule, of names with commas between them."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) and "," in value else value
    return targets_rule(key, names, reading) if names is value else _by_names(key, names, reading, value)


def linear_switch(names_key: str) -> Rule:
    """The rule for a switch that targets all linear layers beside what `names_key` lists."""

    def rule(key: str, value: Any, reading: SourceConfig) -> Row:
        if not is_on(value):
            return row(reading, key, value, "none", f"{names_key} says which")
        return _all_linear(key, value, reading)

    return rule


def images_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the key that says that rows may have images."""
    if value is None:
        return row(reading, key, value, "none", "not set")
    if reading.variant and not vision_tensors(reading.variant):
        return row(reading, key, value, "differs", f"images in the rows, and {reading.variant.name} takes text alone")
    return row(
        reading, key, value, "none", "rows may have images, and are trained on with them; with sound they are none"
    )


def encoders_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of a key that keeps the encoders as they are; else which of their modules are trained, --set says."""
    if value is None or is_on(value):
        return row(reading, key, value, "none", "not set" if value is None else "what Gemsmith does anyway")
    if "lora.targets" in reading.overridden:
        return row(reading, key, value, "set", "--set lora.targets says what is adapted")
    why = "encoders are trained too; --set lora.targets=[..., vision] adapts the vision tower, nothing the audio's"
    return row(reading, key, value, "differs", why)


def experts_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of whether experts are quantized with the rest."""
    has_experts = reading.variant is None or reading.variant.experts
    if not has_experts or value is None or is_on(value) == BACKENDS[reading.backend].quantises_experts:
        return row(reading, key, value, "none", "not set" if value is None else "what Gemsmith does anyway")
    kept = "rounded with the rest" if BACKENDS[reading.backend].quantises_experts else "in bfloat16"
    return row(reading, key, value, "differs", f"experts are {kept} with train.backend {reading.backend}")


def _all_linear(key: str, value: Any, reading: SourceConfig) -> Row:
    if BACKENDS[reading.backend].adapts_all_linear:
        return row(reading, key, value, "derived", "every linear layer but the output's", lora__targets=[ALL_LINEAR])
    kinds, variants = list(LORA_KINDS), [reading.variant] if reading.variant else list(VARIANTS.values())
    linear = dict.fromkeys(tensor.role for one in variants for tensor in lora_targets(one, [ALL_LINEAR]))
    # Adapters on what embeds images never change where rows are text.
    embeds = (
        [] if reading.value("processor_type") else [tensor.role for one in variants for tensor in vision_tensors(one)]
    )
    if others := [role for role in linear if role not in {*kinds, *embeds}]:
        able = " or ".join(name for name, backend in BACKENDS.items() if backend.adapts_all_linear)
        why = f"all linear layers are more: {', '.join(others)} too; --set train.backend={able} adapts them all"
        return row(reading, key, value, "differs", why, lora__targets=kinds)
    return row(reading, key, value, "derived", "every linear layer of the text model", lora__targets=kinds)


def _by_names(key: str, names: Sequence[str], reading: SourceConfig, value: Any) -> Row:
    found, every = _found(reading, lambda module: any(f".{module}".endswith(f".{name}") for name in names))
    strange = [name for name in names if not any(f".{module}".endswith(f".{name}") for module in _both_names(every))]
    return _row_of_kinds(key, value, reading, found, strange)


def _by_expression(key: str, pattern: str, reading: SourceConfig, value: Any) -> Row:
    try:
        expression = compile_pattern(pattern)
        found, _ = _found(reading, lambda module: search(expression, module, whole=True) is not None)
    except ValueError as error:
        raise RecipeError(
            f"{reading.file}: {key} is {pattern!r:.200}, which is not a regular expression that can be used ({error})"
        ) from None
    return _row_of_kinds(key, value, reading, found, [])


def _found(reading: SourceConfig, fits: Callable[[str], bool]) -> tuple[dict[str, float], list[str]]:
    """The share of each kind's modules that fit, and all modules."""
    variant = reading.variant or find_variant("gemma4-31b")
    modules = {kind: [target.module for target in lora_targets(variant, [kind])] for kind in kinds_of(variant)}
    found = {kind: _matched(names, fits) for kind, names in modules.items()}
    if found.get(VISION, 1) < 1 and not reading.value("processor_type"):  # adapters that rows of text never change
        del found[VISION]
    return found, [module for names in modules.values() for module in names]


def _row_of_kinds(key: str, value: Any, reading: SourceConfig, found: dict[str, float], strange: list[str]) -> Row:
    kinds = [kind for kind in found if found[kind]]
    partial = [kind for kind in kinds if found[kind] < 1]
    problems = [f"{', '.join(strange)}: no adapter of Gemsmith's goes there"] if strange else []
    if partial:
        problems.append(f"{', '.join(partial)}: named in some layers only, where Gemsmith adapts every layer")
    if not kinds:
        problems.append("matches no projection of Gemma 4's text model")
    if problems:
        return row(reading, key, value, "differs", "; ".join(problems), **({"lora.targets": kinds} if kinds else {}))
    same = value == [f"{kind}{_SUFFIX}" for kind in kinds]
    return row(
        reading, key, value, "mapped" if same else "derived", "matched against the model's modules", lora__targets=kinds
    )


def _matched(modules: Sequence[str], fits: Callable[[str], bool]) -> float:
    """The share of the modules that fit, by either of their two names."""
    hits = [any(fits(name) for name in _both_names([module])) for module in modules]
    return sum(hits) / len(hits)


def _both_names(modules: Iterable[str]) -> list[str]:
    """Names in the multimodal class and in the text-only one."""
    return [name for module in modules for name in (module, "model." + module.removeprefix(PREFIX))]
