"""One row for each key of a source, and the rules that make the rows.

A rule takes (key, value, reading) and gives the row: what becomes of that key of that file.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gemsmith.arch import Variant
from gemsmith.errors import RecipeError

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
    given: bool = True
    """False where the file leaves the key out and its project's default holds."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One file's settings, its project's defaults beneath, and what is known from elsewhere."""

    file: str
    project: str
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    devices: int | None = None
    steps: int | None = None
    variant: Variant | None = None
    overridden: frozenset[str] = frozenset()
    adapter_elsewhere: bool = False
    backend: str = "tunix"
    """The train.backend that the recipe will have."""

    def value(self, key: str) -> Any:
        """What holds for a key: what the file gives, or the default. An explicit null is a null."""
        return self.given.get(key, self.defaults.get(key))


Rule = Callable[[str, Any, SourceConfig], Row]


def row(reading: SourceConfig, key: str, value: Any, status: Status, why: str, **sets: Any) -> Row:
    """A row of the reading's file; `sets` names the recipe's keys with `__` for a dot: lora__rank=8."""
    renamed = {name.replace("__", "."): value for name, value in sets.items()}
    given = key in reading.given
    if status == "mapped" and not given:
        status, why = "derived", f"{reading.project}'s default" + (f"; {why}" if why else "")
    return Row(file=reading.file, key=key, value=value, status=status, why=why, sets=renamed, given=given)


def to(recipe_key: str, convert: Callable[[Any], Any] = lambda value: value, why: str = "") -> Rule:
    """The rule for a key that means the same in the recipe. Raises RecipeError where its value cannot be converted."""

    def rule(key: str, value: Any, reading: SourceConfig) -> Row:
        if value is None:
            return row(reading, key, value, "none", "not set")
        return row(reading, key, value, "mapped", why, **{recipe_key: read_as(convert, key, value, reading)})

    return or_default(rule)


def or_default(rule: Rule) -> Rule:
    """The rule, for a key whose null is the project's default, as it is where the key is left out."""

    def with_default(key: str, value: Any, reading: SourceConfig) -> Row:
        default = reading.defaults.get(key)
        if value is not None or default is None:
            return rule(key, value, reading)
        found = rule(key, default, reading)
        why = f"not set: {reading.project}'s default, {default}" + (f"; {found.why}" if found.why else "")
        return replace(found, value=None, status="derived" if found.status == "mapped" else found.status, why=why)

    return with_default


def idle(why: str) -> Rule:
    """The rule for a key that nothing learned depends on."""
    return lambda key, value, reading: row(reading, key, value, "none", why)


def plain(*allowed: Any, otherwise: str) -> Rule:
    """The rule for a key whose `allowed` values (and null) are what Gemsmith does anyway.

    Any other value is not.
    """

    def rule(key: str, value: Any, reading: SourceConfig) -> Row:
        if value is None or value in ([], {}, ""):
            return row(reading, key, value, "none", "not set")
        if any(_same(value, item) for item in allowed):
            return row(reading, key, value, "none", "what Gemsmith does anyway")
        return row(reading, key, value, "differs", otherwise)

    return rule


def to_do(why: str) -> Rule:
    """The rule for a key that the user must see to before the recipe runs."""
    return lambda key, value, reading: row(
        reading, key, value, "none" if value is None else "to do", "not set" if value is None else why
    )


def refuse(*allowed: Any, what: str) -> Rule:
    """The rule for a key whose other values ask for something else than supervised fine-tuning.

    Raises RecipeError for them.
    """

    def rule(key: str, value: Any, reading: SourceConfig) -> Row:
        if value is None or any(_same(value, item) for item in allowed):
            return row(reading, key, value, "none", "supervised fine-tuning, as Gemsmith does")
        raise RecipeError(f"{reading.file}: {key} is {value!r}: {what}; Gemsmith does supervised fine-tuning only")

    return rule


def unknown(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of a key that no rule knows.

    Nobody here can say that training does not depend on it, unless it is not set.
    """
    if value is None:
        return row(reading, key, value, "none", "not set")
    return row(
        reading,
        key,
        value,
        "differs",
        f"not known here as a key of {reading.project}; if nothing depends on it, take it out",
    )


def read_as(convert: Callable[[Any], Any], key: str, value: Any, reading: SourceConfig) -> Any:
    """The converted value. Raises RecipeError naming file and key where it is not of that kind."""
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError):
        wanted = (convert.__doc__ or "another kind of value").splitlines()[0].rstrip(".")
        raise RecipeError(f"{reading.file}: {key} is {value!r}; it must be {wanted[0].lower()}{wanted[1:]}") from None


def number(value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not math.isfinite(result := float(value)):
        raise ValueError
    return result


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


def _same(value: Any, item: Any) -> bool:
    # 0 == False in Python, but a file that says 0.0 where the default is False means the same, and 1 for True too.
    return bool(value == item) or (isinstance(value, str) and isinstance(item, str) and value.lower() == item.lower())
