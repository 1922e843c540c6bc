"""YAML read strictly: a key given twice is an error, where PyYAML silently drops the first; 1e-4 is a number."""

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gemsmith.errors import RecipeError, first_line
from gemsmith.system.files import regular_file

MOST_CHARACTERS = 2**20
_MOST_VALUES = 100_000
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")


def read_yaml(file: Path, name: str, base: Any = yaml.SafeLoader) -> Any:
    """What parse_yaml makes of a file. Raises RecipeError also where it cannot be read, or is not UTF-8."""
    try:
        text = regular_file(file, most_bytes=4 * MOST_CHARACTERS).read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{name}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{name}: is not UTF-8 text") from None
    return parse_yaml(text, name, base)


def parse_yaml(text: str, name: str, base: Any = yaml.SafeLoader) -> Any:
    """The value of one document. Raises RecipeError of one line that begins with `name`."""
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(f"{name}: has {len(text):,} characters; allowed are {MOST_CHARACTERS:,}")
    try:
        loader = _strict(base)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise RecipeError(f"{name}{line}: is not YAML ({problem})") from None
    except (RecursionError, ValueError, OverflowError) as error:
        raise RecipeError(f"{name}: is not YAML ({error})") from None


@cache
def _strict(base: Any) -> Any:
    """A loader class that reads as `base`, and refuses what that lets pass."""
    strict: Any = type("Loader", (base,), {})
    strict.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    strict.add_constructor("tag:yaml.org,2002:map", _mapping_of)
    strict.add_constructor("tag:yaml.org,2002:int", _whole_of)
    return strict


def _count(node: yaml.Node, counted: dict[int, float]) -> float:
    """The values of a node, those of an alias wherever it stands. Raises ComposerError for more than anyone writes."""
    if isinstance(node, yaml.CollectionNode) and id(node) not in counted:
        counted[id(node)] = math.inf  # while within itself
        pairs = node.value if isinstance(node, yaml.SequenceNode) else [one for pair in node.value for one in pair]
        counted[id(node)] = 1 + sum(_count(inner, counted) for inner in pairs)
    text = len(node.value) // 20 if isinstance(node, yaml.ScalarNode) else 0  # a long one counts as several
    if (count := counted.get(id(node), 1 + text)) > _MOST_VALUES:
        what = f"aliases are recursive, or make more than {_MOST_VALUES:,} values of it"
        raise yaml.composer.ComposerError(None, None, what, node.start_mark)
    return count


def _whole_of(loader: Any, node: yaml.ScalarNode) -> int:
    if re.match(r"[-+]?0[0-9_]|.*:", node.value):  # octal, and base 60, of YAML 1.1 alone
        raise ValueError(f"{node.value:.80} would be read in base 8 or 60; write a plain number, or put it in quotes")
    value: int = loader.construct_yaml_int(node)
    if value.bit_length() > 1000:  # no float holds it, and Python does not write it out
        raise ValueError("it holds a number of more than 300 digits")
    return value


def _mapping_of(loader: Any, node: yaml.MappingNode) -> dict[str, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice; keep one", key.start_mark)
        seen.add(str(key.value))
    loader.flatten_mapping(node)
    return {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}
