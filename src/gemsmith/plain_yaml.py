"""YAML read strictly: a key given twice is an error, where PyYAML silently drops the first; 1e-4 is a number."""

import re
from typing import Any

import yaml

from gemsmith.errors import RecipeError, first_line


def parse_yaml(text: str, name: str, base: Any = yaml.SafeLoader) -> Any:
    """The value of one document. Raises RecipeError of one line that begins with `name`."""
    try:
        return yaml.load(text, Loader=_strict(base))  # noqa: S506  # a SafeLoader
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        raise RecipeError(
            f"{name}{line}: is not YAML ({getattr(error, 'problem', None) or first_line(error)})"
        ) from None
    except (RecursionError, ValueError) as error:
        raise RecipeError(f"{name}: is not YAML ({error})") from None


def _strict(base: Any) -> Any:
    loader: Any = type("Loader", (base,), {})
    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    loader.add_constructor("tag:yaml.org,2002:map", _mapping_of)
    return loader


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
