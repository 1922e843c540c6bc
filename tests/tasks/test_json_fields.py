"""Objects as models write them, and as nobody should."""

from typing import Any

import pytest

from gemsmith.errors import DataError
from gemsmith.tasks.base import Question
from gemsmith.tasks.json_fields import check, score
from support.cases import each

EXPECTED = '{"name": "bolt", "price": 3, "tags": ["a", {"b": null}], "new": true}'


def question(expected: str = EXPECTED, **columns: Any) -> Question:
    return Question(messages=(), expected=expected, origin="rows.jsonl line 3", columns=columns)


def reason(answer: str, expected: str = EXPECTED, **columns: Any) -> str | None:
    """None where it is right."""
    [verdict] = score(question(expected, **columns), [answer])
    assert verdict.right == (verdict.reason is None)
    return verdict.reason


@pytest.mark.parametrize(
    "answer",
    [
        EXPECTED,
        f"Sure:\n```json\n{EXPECTED}\n```\nDone.",
        f"```\n{{}}\n```\nno, rather\n~~~\n{EXPECTED}\n~~~",
        f"Here it is: {EXPECTED} as asked",
        EXPECTED.replace("3", "3.0").replace("bolt", "\\u0062olt"),
        EXPECTED.replace("3", "30e-1").replace('{"name"', '{"more": 1, "name"'),
    ],
)
def test_the_object_is_found_and_compared_by_value(answer: str) -> None:
    assert reason(answer) is None


@each(
    ("answer", "expected"),
    [
        (EXPECTED.replace("bolt", "nut"), 'name: "nut" instead of "bolt"'),
        (EXPECTED.replace("3", '"3"').replace("true", "1"), 'price: "3" instead of 3; new: 1 instead of true'),
        (EXPECTED.replace("null", "0"), "tags[1].b: 0 instead of null"),
        (EXPECTED.replace('"b": null', '"b": null, "c": 1'), "tags[1].c is not expected"),
        ('{"name": "bolt"}', "price is missing; tags is missing; new is missing"),
        ("{}", "name is missing; price is missing; tags is missing and 1 more"),
        (EXPECTED.replace("3", "3" + "0" * 60), f"price: 3{'0' * 39}… instead of 3"),
        (EXPECTED.replace("3", "3e999999999999"), "price: 3E+999999999999 instead of 3"),
        (EXPECTED.replace("3", "3e9999999999999999999"), "has a number out of all bounds"),
        (EXPECTED.replace("3", "NaN"), "holds NaN, which is not JSON"),
        (EXPECTED.replace('"new"', '"price"'), "gives 'price' twice"),
        ("{" + "".join(f'"k{n}": 0, ' for n in range(200_000)) + '"k199999": 0}', "gives 'k199999' twice"),
        (EXPECTED.replace("null", "[" * 100_000 + "]" * 100_000), "nests too deep"),
        ("I do not know", "holds no JSON object"),
        ("```json\n[1]\n```", "holds no JSON object"),
        ("{'name': 'bolt'}", "is not JSON"),
    ],
)
def test_what_is_wrong_is_said(answer: str, expected: str) -> None:
    assert reason(answer) == expected


def test_a_number_of_many_digits_is_read_and_compared_exactly() -> None:
    digits = "1" * 10_000
    assert reason(f'{{"n": {digits}}}', f'{{"n": {digits}.0}}') is None
    assert reason(f'{{"n": {digits[:-1]}2}}', f'{{"n": {digits}}}') is not None


def test_only_the_named_fields_are_compared() -> None:
    assert reason('{"price": 3}', fields=["price"]) is None
    assert reason('{"price": 3}', fields=["price", "name"]) == "name is missing"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (question("forty"), "the expected answer holds no JSON object; json-fields needs one to compare"),
        (question('{"a": 1, "a": 2}'), "the expected answer gives 'a' twice; json-fields"),
        (question(fields="price"), "fields is 'price'; give a list of the fields to compare"),
        (question(fields=["prize"]), "fields names 'prize', which the expected answer lacks"),
    ],
)
def test_a_row_that_cannot_be_compared_with_is_one_line(asked: Question, said: str) -> None:
    with pytest.raises(DataError) as error:
        check(asked)
    assert str(error.value).startswith(f"rows.jsonl line 3: {said}")
