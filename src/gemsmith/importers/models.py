"""The base model of a source as a checkpoint and variant of Gemma 4, and its target modules as kinds of projection."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gemsmith.arch import LORA_KINDS, VARIANTS, Variant, find_variant, lora_targets, read_variant, variant_of_hub_id
from gemsmith.arch.lora_targets import ALL_LINEAR, VISION, kinds_of
from gemsmith.arch.tensors import PREFIX, vision_tensors
from gemsmith.checkpoints.folder import name_variant, read_config
from gemsmith.errors import RecipeError
from gemsmith.importers.table import Row, Setting, SourceConfig, if_set, is_on
from gemsmith.recipe.backends import BACKENDS
from gemsmith.system.files import expanduser
from gemsmith.system.patterns import compile_pattern, search

_SIZE = re.compile(r"gemma[-_]?4[-_](e2b|e4b|12b|26b[-_]a4b|31b)(?![0-9a-z])", re.IGNORECASE)
_QUANTIZED = re.compile(
    r"(?<![a-z])(bnb|gptq|awq|gguf|nvfp4|fp8|int4|int8|w4a16|w8a8|qat|[48]bit)(?![a-z])", re.IGNORECASE
)


class Base(NamedTuple):
    """What a checkpoint is, and how that is known; `model` is set where the recipe cannot know it from its name."""

    variant: Variant
    why: str
    model: str | None = None


def find_base(name: Any, where: str, *, model: str | None = None) -> Base:
    """What a source calls its base model. Raises RecipeError where that is not known as a Gemma 4 of plain weights."""
    if not isinstance(name, str):
        raise RecipeError(f"{where} is {name!r}; it must be one hub id or folder")
    folder = expanduser(name)
    if (folder / "config.json").is_file():
        variant = name_variant(read_variant(read_config(folder)))
        return Base(variant, f"a folder of {variant.name}")
    if _QUANTIZED.search(name):
        size = _variant_of_size(name)
        same = [hub_id for hub_id in size.hub_ids if hub_id.endswith("-it") == ("-it" in name.lower())] if size else []
        plain = (same or ["google/gemma-4-31B-it"])[0]
        remedy = f"give the plain ones, such as --set checkpoint={plain}"
        raise RecipeError(f"{where} is {name!r}: quantized weights; {remedy}")
    if model is not None:
        return Base(find_variant(model), f"{model} by --set", model)
    if variant_of_id := variant_of_hub_id(name):
        return Base(variant_of_id, variant_of_id.name)
    if found := _variant_of_size(name):
        return Base(found, f"{found.name} by its name", found.name)
    says = "--set model=gemma4-12b says that it is a copy of that one"
    ports = "--set checkpoint=google/gemma-4-12B-it ports the other settings onto that one"
    raise RecipeError(f"{where} is {name!r}: not known as a Gemma 4; {says}, {ports}")


def _variant_of_size(name: str) -> Variant | None:
    size = _SIZE.search(name)
    return VARIANTS[f"gemma4-{size[1].lower().replace('_', '-')}"] if size else None


@if_set
def base_rule(setting: Setting) -> Row:
    config = setting.config
    if "checkpoint" in config.overridden:
        return setting.overridden("--set checkpoint names another")
    model = config.variant.name if config.variant and "model" in config.overridden else None
    base = find_base(setting.value, f"{config.file}: {setting.key}", model=model)
    if base.model is not None and "model" not in config.overridden:
        return setting.derived({"checkpoint": setting.value, "model": base.model}, base.why)
    return setting.mapped({"checkpoint": setting.value}, base.why)


def targets_rule(setting: Setting) -> Row:
    """The row of target modules: a list of names, a regular expression of whole names, or a word for all of them."""
    value = setting.value
    if value is None:
        return setting.derived({"lora.targets": ["q", "v"]}, "PEFT's own for Gemma 4: q_proj and v_proj")
    names = value if isinstance(value, list) else [value]
    # TRL reads a list of one as that one.
    alone = names[0] if len(names) == 1 else None
    if isinstance(alone, str) and alone.lower() in ("all-linear", "all", "all_linear"):
        return _all_linear(setting)
    where = f"{setting.config.file}: {setting.key}"
    if not all(isinstance(name, str) and name for name in names):
        raise RecipeError(f"{where} is {value!r}; it must be names of modules or one regular expression")
    if alone is None or re.fullmatch(r"[\w.]+", alone):
        return _by_names(setting, names)
    try:
        expression = compile_pattern(alone)
        found, _ = _match(setting.config, lambda module: search(expression, module, whole=True) is not None)
    except ValueError as error:
        why = f"which is not a regular expression that can be used ({error})"
        raise RecipeError(f"{where} is {alone!r:.200}, {why}") from None
    return _row_of_kinds(setting, found, [])


def comma_targets(setting: Setting) -> Row:
    """As targets_rule, of names with commas between them."""
    if isinstance(setting.value, str) and "," in setting.value:
        return _by_names(setting, [name.strip() for name in setting.value.split(",")])
    return targets_rule(setting)


def linear_rule(setting: Setting) -> Row:
    """The row of a switch that targets all linear layers beside what lora_target_modules lists."""
    return _all_linear(setting) if is_on(setting.value) else setting.ignored("lora_target_modules says which")


@if_set
def images_rule(setting: Setting) -> Row:
    variant = setting.config.variant
    if variant and not vision_tensors(variant):
        return setting.differs(f"images in the rows, and {variant.name} takes text alone")
    return setting.ignored("rows may have images, and are trained on with them; with sound they are none")


@if_set
def encoders_rule(setting: Setting) -> Row:
    """The row of a key that keeps the encoders as they are; else which of their modules are trained, --set says."""
    if is_on(setting.value):
        return setting.ignored("what Gemsmith does anyway")
    if "lora.targets" in setting.config.overridden:
        return setting.overridden("--set lora.targets says what is adapted")
    remedy = "--set lora.targets=[..., vision] adapts the vision tower, nothing the audio's"
    return setting.differs(f"encoders are trained too; {remedy}")


@if_set
def experts_rule(setting: Setting) -> Row:
    """The row of whether experts are quantized with the rest."""
    config = setting.config
    quantizes = BACKENDS[config.backend].quantises_experts
    if (config.variant and not config.variant.experts) or is_on(setting.value) == quantizes:
        return setting.ignored("what Gemsmith does anyway")
    kept = "rounded with the rest" if quantizes else "in bfloat16"
    return setting.differs(f"experts are {kept} with train.backend {config.backend}")


def _all_linear(setting: Setting) -> Row:
    config = setting.config
    if BACKENDS[config.backend].adapts_all_linear:
        return setting.derived({"lora.targets": [ALL_LINEAR]}, "every linear layer but the output's")
    kinds, variants = list(LORA_KINDS), [config.variant] if config.variant else list(VARIANTS.values())
    adapted = set(kinds)
    if not config.value("processor_type"):  # adapters on what embeds images never change where rows are text
        adapted |= {tensor.role for one in variants for tensor in vision_tensors(one)}
    linear = dict.fromkeys(tensor.role for one in variants for tensor in lora_targets(one, [ALL_LINEAR]))
    if others := [role for role in linear if role not in adapted]:
        able = " or ".join(name for name, backend in BACKENDS.items() if backend.adapts_all_linear)
        why = f"all linear layers are more: {', '.join(others)} too; --set train.backend={able} adapts them all"
        return setting.differs(why, {"lora.targets": kinds})
    return setting.derived({"lora.targets": kinds}, "every linear layer of the text model")


def _by_names(setting: Setting, names: Sequence[str]) -> Row:
    found, modules = _match(setting.config, lambda module: f".{module}".endswith(tuple(f".{name}" for name in names)))
    strange = [name for name in names if not any(f".{module}".endswith(f".{name}") for module in modules)]
    return _row_of_kinds(setting, found, strange)


def _match(config: SourceConfig, fits: Callable[[str], bool]) -> tuple[dict[str, float], list[str]]:
    """The share of each kind's modules that fit, and all modules, in the multimodal class and in the text-only one."""
    variant = config.variant or find_variant("gemma4-31b")
    found, every = {}, []
    for kind in kinds_of(variant):
        targets = [target.module for target in lora_targets(variant, [kind])]
        names = [(module, "model." + module.removeprefix(PREFIX)) for module in targets]
        found[kind] = sum(fits(full) or fits(short) for full, short in names) / len(names)
        every += [name for both in names for name in both]
    if found.get(VISION, 1) < 1 and not config.value("processor_type"):  # adapters that rows of text never change
        del found[VISION]
    return found, every


def _row_of_kinds(setting: Setting, found: dict[str, float], strange: list[str]) -> Row:
    kinds = [kind for kind in found if found[kind]]
    partial = [kind for kind in kinds if found[kind] < 1]
    problems = [f"{', '.join(strange)}: no adapter of Gemsmith's goes there"] if strange else []
    if partial:
        problems.append(f"{', '.join(partial)}: named in some layers only, where Gemsmith adapts every layer")
    if not kinds:
        problems.append("matches no projection of Gemma 4's text model")
    sets = {"lora.targets": kinds} if kinds else {}
    if problems:
        return setting.differs("; ".join(problems), sets)
    same = setting.value == [f"{kind}_proj" for kind in kinds]
    return setting.row("mapped" if same else "derived", "matched against the model's modules", sets)
