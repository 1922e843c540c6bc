"""The scorer `json-fields`: an answer is right where its JSON object has the expected fields with equal values.

The object is the answer's last fenced block, or else what lies between its first `{` and last `}`. The expected answer
is read the same way. Compared are all fields of the expected object, or those that the column or option `fields` names;
others that the answer has are ignored. Numbers are equal by value (1 = 1.0 = 1e0), of any size; 1 is not true.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from gemsmith.errors import DataError
from gemsmith.tasks.base import Question, Verdict
from gemsmith.tasks.messages import fenced_blocks

COLUMNS: tuple[str, ...] = ()
OPTIONAL_COLUMNS = ("fields",)
_SHOWN = 40
_NAMED = 3


class _Unusable(Exception):  # noqa: N818 - not an error but a finding
    """A text holds no JSON object that can be compared; says why."""


def check(question: Question) -> None:
    """Raises DataError where the expected answer has no such object, or not the fields to compare."""
    fields = question.columns.get("fields")
    if fields is not None and not (isinstance(fields, list) and fields and all(isinstance(one, str) for one in fields)):
        raise DataError(f"{question.origin}: fields is {fields!r}; give a list of the fields to compare")
    try:
        expected = _read(question.expected)
    except _Unusable as reason:
        raise DataError(f"{question.origin}: the expected answer {reason}; json-fields needs one to compare") from None
    if missing := next((name for name in fields or () if name not in expected), None):
        raise DataError(f"{question.origin}: fields names {missing!r}, which the expected answer lacks")


def score(question: Question, answers: Sequence[str]) -> list[Verdict]:
    """A verdict for each answer, whose reason names the first fields that differ."""
    expected = _read(question.expected)
    fields = question.columns.get("fields") or list(expected)
    expected = {name: expected[name] for name in fields}
    verdicts = []
    for answer in answers:
        try:
            found = _read(answer)
            wrong = list(_differing({name: found[name] for name in expected if name in found}, expected, ""))
        except _Unusable as reason:
            wrong = [str(reason)]
        except RecursionError:
            wrong = ["nests too deep"]
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        verdicts.append(Verdict(right=not wrong, reason="; ".join(wrong[:_NAMED]) + more if wrong else None))
    return verdicts


def _read(text: str) -> dict[str, Any]:
    """The object in a text, its numbers exact. Raises _Unusable."""
    fenced = fenced_blocks(text)
    begin, end = text.find("{"), text.rfind("}")
    if not fenced and not 0 <= begin < end:
        raise _Unusable("holds no JSON object")
    try:
        found = json.loads(
            fenced[-1] if fenced else text[begin : end + 1],
            parse_float=Decimal,
            parse_int=Decimal,
            parse_constant=_refuse_constant,
            object_pairs_hook=_object,
        )
    except RecursionError:
        raise _Unusable("nests too deep") from None
    except InvalidOperation:
        raise _Unusable("has a number out of all bounds") from None
    except ValueError:
        raise _Unusable("is not JSON") from None
    if not isinstance(found, dict):
        raise _Unusable("holds no JSON object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _Unusable(f"gives {counts.most_common(1)[0][0]!r} twice")
    return found


def _refuse_constant(name: str) -> None:
    raise _Unusable(f"holds {name}, which is not JSON")


def _differing(found: Any, expected: Any, place: str) -> Iterator[str]:
    """What differs, such as `address.city: "Rome" instead of "Paris"`."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for name in expected:
            inner = f"{place}.{name}" if place else name
            if name not in found:
                yield f"{inner} is missing"
            else:
                yield from _differing(found[name], expected[name], inner)
        # A field of an object inside the expected ones is part of its value; at the top it is another field.
        yield from (f"{place}.{name} is not expected" for name in found if place and name not in expected)
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _differing(one, other, f"{place}[{index}]")
    elif type(found) is not type(expected) or found != expected:
        yield f"{place}: {_shown(found)} instead of {_shown(expected)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, Decimal) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
