"""JSON read strictly: a key given twice, which Python takes silently, and endless nesting are errors of one line."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from gemsmith.system.files import regular_file

_DEEPEST = 100


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice:.80} is given twice; keep one")
    return values


def _whole(digits: str) -> int:
    if len(digits) > 300:  # no float holds it
        raise ValueError(f"has a number of {len(digits):,} digits")
    return int(digits)


_decode = json.JSONDecoder(object_pairs_hook=_once, parse_int=_whole).decode


def parse_json(text: str) -> Any:
    """The value of a document. Raises ValueError of one line, JSONDecodeError where it says which column."""
    try:
        return _decode(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def read_json(file: Path, *, most_bytes: int = 2**27) -> Any:
    """The value in a file of settings. Raises OSError, and ValueError of one line, for what cannot be used."""
    values = parse_json(regular_file(file, most_bytes=most_bytes).read_text(encoding="utf-8-sig"))
    level = [values]
    for _ in range(_DEEPEST):
        nested = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [inner for each in nested for inner in each]
        if not level:
            return values
    raise ValueError("is nested too deeply")
