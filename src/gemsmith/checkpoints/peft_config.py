"""What a PEFT folder's adapter_config.json says of plain LoRA: ranks, scales, and which modules get an adapter."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from gemsmith.errors import CheckpointError
from gemsmith.recipe.schema import lora_scale
from gemsmith.system.json import read_json
from gemsmith.system.patterns import compile_pattern, search

CONFIG = "adapter_config.json"
# What PEFT can also do, and the values that mean it does not: an adapter that uses it is not W + scale * B A.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None), "lora_bias": (False, None), "bias": ("none",), "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []), "layer_replication": (None,), "target_parameters": (None, []),
    "trainable_token_indices": (None,), "use_qalora": (False, None), "use_bdlora": (None, False),
    "alora_invocation_tokens": (None,), "arrow_config": (None,), "kasa_config": (None,), "monteclora_config": (None,),
    "velora_config": (None,),
}  # fmt: skip
_MOST_PATTERNS = 1000  # each is tried on every module
# Ways to begin that leave the base's weights as they are; all others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take the
# first B A off them, so that what was trained does not fit the base itself.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_NAMES = "a list of modules' names, or one regular expression"
_PATTERNS = f"a map of at most {_MOST_PATTERNS:,} modules' names to numbers above 0"
_AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PeftConfig(BaseModel, frozen=True, strict=True):
    """`r`, `lora_alpha` and what may differ from them by module, under the names of the class that was trained."""

    rank: int = Field(validation_alias="r", gt=0, description="a whole number above 0")
    alpha: _AboveZero = Field(validation_alias="lora_alpha", description="a number above 0")
    rslora: bool = Field(False, validation_alias="use_rslora", description="true or false")
    dropout: float = Field(0.0, validation_alias="lora_dropout", ge=0, lt=1, description="a number from 0 to below 1")
    rank_pattern: dict[str, _AboveZero] = Field({}, max_length=_MOST_PATTERNS, description=_PATTERNS)
    alpha_pattern: dict[str, _AboveZero] = Field({}, max_length=_MOST_PATTERNS, description=_PATTERNS)
    target_modules: str | list[str] = Field("", description=_NAMES)
    exclude_modules: str | list[str] = Field("", description=_NAMES)
    layers_to_transform: int | list[int] = Field([], description="a layer or a list of them")

    @property
    def scale(self) -> float:
        return lora_scale(rank=self.rank, alpha=self.alpha, rslora=self.rslora)

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return lora_scale(rank=self.rank_of(module), alpha=alpha, rslora=self.rslora)

    def targets(self, module: str) -> bool | None:
        """Whether PEFT would put an adapter on a module of that name; None where the config gives no names."""
        wanted, layers = self.target_modules, self.layers_to_transform
        if not wanted or wanted == "all-linear":
            return None
        if self.exclude_modules and _named(self.exclude_modules, module):
            return False
        if isinstance(wanted, str) or layers == []:
            return _named(wanted, module)
        number = re.search(r"\blayers\.(\d+)\.", module)
        in_layers = number is not None and int(number[1]) in ([layers] if isinstance(layers, int) else layers)
        return in_layers and _named(wanted, module)


def read_peft_config(folder: Path) -> PeftConfig:
    """The folder's adapter_config.json. Raises CheckpointError where it is missing, damaged or not plain LoRA's."""
    file = folder / CONFIG
    try:
        config = read_json(file, most_bytes=2**20)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"adapter {folder}: has no {CONFIG}; give a folder that PEFT or Gemsmith wrote") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: must be a LoRA adapter's (peft_type LORA)")
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            why = f"only plain LoRA is known here ({key} = {plain[0]!r})"
            raise CheckpointError(f"{file}: has {key} = {json.dumps(config[key]):.200}; {why}")
    if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
        why = f"has init_lora_weights = {json.dumps(start):.200}, which changed the base's weights before training"
        remedy = "with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        raise CheckpointError(f"{file}: {why}; save the adapter for the base itself {remedy}")
    try:
        return PeftConfig.model_validate({key: value for key, value in config.items() if value is not None})
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        (field,) = (each for name, each in PeftConfig.model_fields.items() if key in (name, each.validation_alias))
        given = json.dumps(config.get(key))
        raise CheckpointError(f"{file}: has {key} = {given:.200}; it must be {field.description}") from None


def _named(names: str | Sequence[str], module: str) -> bool:
    """As PEFT reads it: a text is a regular expression of the whole name, a list holds names or ends of names."""
    if isinstance(names, str):
        return _matches(names, module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """As PEFT reads rank_pattern and alpha_pattern: the first key that matches the end of the name."""
    return next((value for key, value in patterns.items() if _matches(rf"(.*\.)?({key})$", module)), default)


def _matches(pattern: str, module: str) -> bool:
    try:
        return search(compile_pattern(pattern), module, whole=True) is not None
    except ValueError as error:
        reason = f"is no regular expression that can be used ({error})"
        raise CheckpointError(f"{CONFIG}: {pattern!r:.200} {reason}") from None
