"""A setting of another project's file, the row that says what becomes of it, and the rules for single keys."""

import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gemsmith.arch import Variant
from gemsmith.errors import RecipeError
from gemsmith.system.yaml import parse_yaml

Status = Literal["mapped", "derived", "set", "to do", "none", "differs"]
"""mapped: the same in the recipe; derived: worked out, from several keys or a default; set: --set decides; to do: the
user must see to it, and the recipe does not run before; none: no counterpart, and nothing that is learned depends on
it; differs: it would train differently."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one key of one file. `sets` holds dotted keys of the recipe and their values."""

    file: str
    key: str
    value: Any
    status: Status
    why: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    given: bool = True  # False where the file leaves the key out and its project's default holds


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One file's settings, its project's defaults beneath, and what is known from elsewhere."""

    file: str
    project: str
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    devices: int | None
    steps: int | None
    variant: Variant | None
    overridden: frozenset[str]
    adapter_elsewhere: bool
    backend: str  # the train.backend that the recipe will have

    def value(self, key: str) -> Any:
        """What holds for a key: what the file gives, or the default. An explicit null is a null."""
        return self.given.get(key, self.defaults.get(key))

    def is_on(self, key: str) -> bool:
        """Whether a switch is on."""
        return is_on(self.value(key))

    def read(self, key: str, convert: Callable[[Any], Any]) -> Any:
        """The converted value of a key. Raises RecipeError as Setting.read does."""
        return Setting(key, self.value(key), self).read(convert)


@dataclass(frozen=True)
class Setting:
    """One key of a file with its value. Its methods make the row; `sets` holds dotted keys of the recipe."""

    key: str
    value: Any
    config: SourceConfig

    def read(self, convert: Callable[[Any], Any]) -> Any:
        """The converted value. Raises RecipeError naming file and key where it is not of that kind."""
        try:
            return convert(self.value)
        except (TypeError, ValueError, OverflowError):
            wanted = (convert.__doc__ or "").splitlines()[0].rstrip(".")
            wanted = wanted[0].lower() + wanted[1:]
            raise RecipeError(f"{self.config.file}: {self.key} is {self.value!r}; it must be {wanted}") from None

    def row(self, status: Status, why: str, sets: Mapping[str, Any] | None = None) -> Row:
        """The row of that status; a default that maps is derived."""
        given = self.key in self.config.given
        if status == "mapped" and not given:
            status, why = "derived", f"{self.config.project}'s default" + (f"; {why}" if why else "")
        return Row(
            file=self.config.file, key=self.key, value=self.value, status=status, why=why, sets=sets or {}, given=given
        )

    def mapped(self, sets: Mapping[str, Any], why: str = "") -> Row:
        return self.row("mapped", why, sets)

    def derived(self, sets: Mapping[str, Any], why: str) -> Row:
        return self.row("derived", why, sets)

    def ignored(self, why: str) -> Row:
        return self.row("none", why)

    def differs(self, why: str, sets: Mapping[str, Any] | None = None) -> Row:
        return self.row("differs", why, sets)

    def to_do(self, why: str, sets: Mapping[str, Any] | None = None) -> Row:
        return self.row("to do", why, sets)

    def overridden(self, why: str) -> Row:
        return self.row("set", why)


Rule = Callable[[Setting], Row]


def if_set(rule: Rule) -> Rule:
    """The rule, for a key whose null says nothing."""

    @functools.wraps(rule)
    def row_of(setting: Setting) -> Row:
        return setting.ignored("not set") if setting.value is None else rule(setting)

    return row_of


def or_default(rule: Rule) -> Rule:
    """The rule, for a key whose null is the project's default, as it is where the key is left out."""

    @functools.wraps(rule)
    def row_of(setting: Setting) -> Row:
        default = setting.config.defaults.get(setting.key)
        if setting.value is not None or default is None:
            return rule(setting)
        found = rule(replace(setting, value=default))
        why = f"not set: {setting.config.project}'s default, {default}" + (f"; {found.why}" if found.why else "")
        return replace(found, value=None, status="derived" if found.status == "mapped" else found.status, why=why)

    return row_of


def read_rules(section: str) -> dict[str, Rule]:
    """The rules of the keys in that section of keys.yaml."""
    groups = key_table()[section]
    rules = {key: maps_to(recipe_key) for key, recipe_key in groups.get("maps", {}).items()}
    for kind in ("supports", "refuses", "ignores", "derives", "to_do"):
        for why, keys in groups.get(kind, {}).items():
            for names, allowed in (keys if isinstance(keys, dict) else {keys: None}).items():
                values = allowed if isinstance(allowed, list) else [] if allowed is None else [allowed]
                rules |= dict.fromkeys(names.split(), rule_of(kind, why, values))
    return rules | {key: by_value(cases) for key, cases in groups.get("by_value", {}).items()}


@functools.cache
def key_table() -> Mapping[str, Any]:
    """What keys.yaml holds."""
    file = Path(__file__).with_name("keys.yaml")
    table: Mapping[str, Any] = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    return table


def read_defaults(project: str) -> dict[str, Any]:
    """What holds where a file of the project leaves a key out, by keys.yaml."""
    return dict(key_table()["defaults"][project])


def maps_to(recipe_key: str) -> Rule:
    """The rule for a key that means the same in the recipe. Raises RecipeError where its value cannot be converted."""
    converters: dict[str, Callable[[Any], Any]] = {
        "lora.rank": positive, "lora.rslora": flag, "data.max_length": positive, "data.packing": flag, "seed": whole,
    }  # fmt: skip

    @or_default
    @if_set
    def row_of(setting: Setting) -> Row:
        why = "documents kept apart" if recipe_key == "data.packing" else ""
        return setting.mapped({recipe_key: setting.read(converters.get(recipe_key, number))}, why)

    return row_of


def rule_of(kind: str, why: str, allowed: Sequence[Any]) -> Rule:
    """The rule for a key of that kind in keys.yaml. Raises RecipeError for a value that is refused."""
    statuses: dict[str, Status] = {"supports": "differs", "to_do": "to do", "derives": "derived"}

    def row_of(setting: Setting) -> Row:
        if kind == "ignores":
            return setting.ignored(why)
        if setting.value is None or setting.value in ([], {}, ""):
            return setting.ignored("not set")
        if _is_one_of(setting.value, allowed):
            return setting.ignored("what Gemsmith does anyway")
        if kind == "refuses":
            remedy = "Gemsmith does supervised fine-tuning only"
            raise RecipeError(f"{setting.config.file}: {setting.key} is {setting.value!r}: {why}; {remedy}")
        return setting.row(statuses[kind], why.format(value=setting.value))

    return row_of


def by_value(cases: Sequence[Mapping[str, Any]]) -> Rule:
    """The rule for a key whose values have a row each: the first of the cases that fits its value and other keys'."""

    @or_default
    def row_of(setting: Setting) -> Row:
        value, config = setting.value, setting.config

        def fits(case: Mapping[str, Any]) -> bool:
            others = [(config.value(key), allowed) for key, allowed in case.get("when", {}).items()]
            return all(_is_one_of(*one) for one in [(value, case.get("is", [value])), *others])

        case = next(filter(fits, cases))
        said = case.get("sets", {}).items()
        sets = {key: text.format(value=value) if isinstance(text, str) else text for key, text in said}
        return setting.row(case["status"], case.get("why", ""), sets)

    return row_of


@if_set
def unknown(setting: Setting) -> Row:
    """The row of a key that no rule knows: nobody here can say that training does not depend on it."""
    why = f"not known here as a key of {setting.config.project}"
    return setting.differs(f"{why}; if nothing depends on it, take it out")


def number(value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not math.isfinite(result := float(value)):
        raise ValueError
    return result


def number_or_none(value: Any) -> float | None:
    """The number, or None for what is not one."""
    try:
        return number(value)
    except (TypeError, ValueError):
        return None


def whole(value: Any) -> int:
    """A whole number."""
    result = number(value)
    if result != int(result):
        raise ValueError
    return int(result)


def positive(value: Any) -> int:
    """A whole number above 0."""
    if (result := whole(value)) < 1:
        raise ValueError
    return result


def flag(value: Any) -> bool:
    """True or false."""
    named = {"true": True, "false": False, "yes": True, "no": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in named:
        return named[value.lower()]
    raise ValueError


def is_on(value: Any) -> bool:
    """Whether a switch that may be null, text or a number is on."""
    return (value.lower() if isinstance(value, str) else value) not in (None, False, 0, "", "false", "no", "off")


def _is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    # 0 == False in Python: a file that says 0.0 where the default is False means the same, and 1 for True too.
    patterns = [item.lower() for item in allowed if isinstance(item, str)] if isinstance(value, str) else []
    return value in allowed or any(fnmatch.fnmatchcase(value.lower(), pattern) for pattern in patterns)
