"""The scorer `labels`: what counts as which label."""

import pytest

from gemsmith.errors import DataError
from gemsmith.tasks import contained_label, find_scorer
from gemsmith.tasks.base import Classifier, Question
from gemsmith.tasks.classification import NAMED, check, find_label, list_labels, normalize, score
from gemsmith.tasks.messages import text_message

LABELS = ["cat", "cat fish", "St. Bernard", "C++"]


def question(expected: str = "cat", labels: object = LABELS) -> Question:
    columns = {} if labels is None else {"labels": labels}
    return Question(messages=(text_message("user", "a"),), expected=expected, origin="row 3", columns=columns)


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("cat", "cat"),
        (" Cat.\n", "cat"),
        ("**Cat  Fish**", "cat fish"),
        ('"st. bernard."', "St. Bernard"),
        ("“C++”", "C++"),
        ("a cat", None),
        ("cats", None),
        ("", None),
        ("cat, cat fish", None),
    ],
)
def test_an_answer_is_a_label_whatever_its_case_spaces_and_signs_around(answer: str, label: str | None) -> None:
    assert find_label(answer, LABELS) == label
    (verdict,) = score(question(), [answer])
    assert verdict.right == (label == "cat")
    assert verdict.reason == (None if label == "cat" else "no label" if label is None else "another label")


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("cat", True),
        ("This is a cat.", True),
        ("A cat, I would say: cat!", True),
        ("a cat fish", False),
        ("a cat or a st. bernard", False),
        ("cats", False),
        ("a dog", False),
    ],
)
def test_beside_it_stands_whether_the_answer_names_the_label_and_no_other(answer: str, named: bool) -> None:
    (verdict,) = score(question(), [answer])
    assert verdict.others == {NAMED: named}


def test_without_a_list_the_expected_answers_are_the_labels() -> None:
    rows = [question("b", None), question("A", None), question("b", None)]
    assert list_labels(rows) == ("A", "b")
    (verdict,) = score(rows[0], ["c"])
    assert (verdict.right, verdict.reason, verdict.others) == (False, "not the label", {})
    check(rows[0])
    assert list_labels([question(), question()]) == ("C++", "cat", "cat fish", "St. Bernard")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (question(labels="cat"), "labels is 'cat'; give a list of texts"),
        (question(labels=["cat", "“.”"]), "give a list of texts"),
        (question(labels=["cat", "Cat. "]), "two of its labels differ in nothing but case"),
        (question(expected="dog"), "the expected answer 'dog' is none of the labels"),
    ],
)
def test_rows_that_cannot_be_scored_by_are_refused_with_their_place(asked: Question, message: str) -> None:
    with pytest.raises(DataError) as error:
        check(asked)
    assert str(error.value).startswith("row 3: ") and message in str(error.value)


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("cat", "cat"),
        ("It is a **Cat fish**, no cat.", "cat fish"),
        ("cats", "cat"),
        ("This is a st. bernard", "St. Bernard"),
        ("a dog", None),
        ("", None),
    ],
)
def test_a_contained_label_is_the_longest_in_the_answer_with_the_exact_one_beside(
    answer: str, label: str | None
) -> None:
    assert contained_label.find_label(answer, LABELS) == label
    (verdict,) = contained_label.score(question(), [answer])
    assert verdict.right == (label == "cat") and verdict.others == {contained_label.EXACT: answer == "cat"}
    assert verdict.reason == (None if label == "cat" else "no label" if label is None else "another label")
    assert isinstance(find_scorer("contained-label"), Classifier)
    with pytest.raises(DataError, match="row 3: has no labels; give all of them"):
        contained_label.check(question(labels=None))
    with pytest.raises(DataError, match="is none of the labels"):
        contained_label.check(question("dog"))


def test_it_is_a_classifier_and_others_are_not() -> None:
    assert isinstance(find_scorer("labels"), Classifier) and not isinstance(find_scorer("exact"), Classifier)


def test_accents_are_compared_however_they_are_written() -> None:
    assert normalize("Cafe\u0301") == normalize("CAFÉ")
