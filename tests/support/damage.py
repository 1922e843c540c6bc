"""Strategies of Hypothesis that damage what is whole: a document at a place or three, a file's bytes anywhere."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

_NUMBERS = [0, -1, 1, 7, 2**31, 2**63, 2**64, 10**30, 10**400, 0.5, 1e308, 1e-320, -0.0]
_NUMBERS += [float("inf"), float("-inf"), float("nan")]
_TEXTS = [
    "",
    " ",
    "\0",
    "\ud800",
    "\u2028",
    "~",
    "../..",
    "/dev/zero",
    "/",
    "-",
    "5%",
    "1e5",
    "yes",
    "null",
    "NaN",
    "\U0001d7d9",
]
_TEXTS += ["hub:a/b", "gs://b/c", "{{x}}", "(", "(.*)*x", "(a+)+$", "((a{1000}){1000}){1000}", "word " * 999]
_KEYS = ["", "0", "role", "type", "model_type", "task", "path", "checksums", "__metadata__", "\0", "a.b", "x" * 300]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(_NUMBERS)
    | st.sampled_from(_TEXTS)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=3),
    max_leaves=5,
)
NESTED = st.sampled_from([90, 101, 990, 60_000]).map(lambda depth: "[" * depth + "]" * depth)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object inside the value, with each of its keys."""
    for key in [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


@st.composite
def damaged(draw: st.DrawFn, whole: Any) -> Any:
    """The document with up to three places changed, removed, doubled, wrapped, renamed or set to another's value."""
    value = json.loads(json.dumps(whole))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        places = [*_places(value)]
        if not places:
            return draw(VALUES)
        inside, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["change", "change", "change", "remove", "add", "wrap", "swap"])):
            case "change":
                inside[key] = draw(VALUES)
            case "remove":
                del inside[key]
            case "add" if isinstance(inside, dict):
                inside[draw(st.sampled_from(_KEYS) | st.text(max_size=5))] = draw(VALUES)
            case "add":
                inside.insert(key, draw(VALUES))
            case "wrap":
                inside[key] = draw(st.sampled_from([[inside[key]], {"x": inside[key]}, [inside[key]] * 2]))
            case "swap":
                holder, name = draw(st.sampled_from(places))
                inside[key] = json.loads(json.dumps(holder[name]))
    return draw(st.sampled_from([value] * 30 + [[value], None, []]))


@st.composite
def damaged_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes with up to four stretches changed, taken out, put in or cut off."""
    data = bytearray(whole)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.integers(0, 9)))
        match draw(st.sampled_from(["flip", "flip", "flip", "change", "change", "remove", "add", "double", "cut"])):
            case "flip" if begin < len(data):
                data[begin] ^= 1 << draw(st.integers(0, 7))
            case "flip" | "cut":
                del data[begin:]
            case "change":
                data[begin:end] = draw(st.binary(min_size=end - begin, max_size=end - begin))
            case "remove":
                del data[begin:end]
            case "add":
                data[begin:begin] = draw(
                    st.binary(max_size=9) | st.sampled_from([b"\xff" * 8, b"\0" * 300, b"9" * 400])
                )
            case "double":
                data[begin:begin] = data[max(0, begin - 99) : begin]
    return bytes(data)


def json_of(whole: Any) -> st.SearchStrategy[bytes]:
    """The JSON of a document that was damaged as a document, or as bytes, or is nested without end."""
    text = json.dumps(whole).encode()
    as_document = damaged(whole).map(lambda value: json.dumps(value).encode())
    return as_document | as_document | damaged_bytes(text) | NESTED.map(str.encode)
