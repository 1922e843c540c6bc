"""A classifier's scores, against scikit-learn's definitions worked out by hand."""

import numpy as np
import pytest

from gemsmith.evals.generate import GradedAnswer
from gemsmith.evals.labels import MOST_CONFUSED, MOST_OF_ONE_KIND, UNKNOWN, label_scores, macro_f1
from gemsmith.tasks import find_scorer
from gemsmith.tasks.base import Question
from gemsmith.tasks.messages import ImagePart, Message, TextPart, text_message
from support.images import image_bytes

NAMES = ["a", "b", "c"]


def asked(*expected: str, image: bytes | None = None) -> list[Question]:
    parts = (*([ImagePart(data=image)] if image else []), TextPart(text="which?"))
    return [
        Question(
            messages=(Message(role="user", parts=parts),),
            expected=label,
            origin=f"row {row}",
            columns={"labels": NAMES},
        )
        for row, label in enumerate(expected, 1)
    ]


def answered(questions: list[Question], *texts: str) -> list[GradedAnswer]:
    pairs = zip(texts, questions, strict=True)
    return [GradedAnswer(text=text, right=text == question.expected, cut=False) for text, question in pairs]


def scores(questions: list[Question], base: list[GradedAnswer], tuned: list[GradedAnswer]):
    return label_scores(find_scorer("labels"), questions, base, tuned)


def test_macro_f1_is_the_mean_over_labels_with_rows():
    # a: 2 hits, 1 wrong answer of it, none missed; b: 1 hit of 2 rows, none wrong; c has no row, and one answer.
    expected, given = np.array([0, 0, 1, 1, 1]), np.array([0, 0, 1, 0, 2])
    assert macro_f1(expected, given, 3) == pytest.approx((4 / 5 + 2 / 4) / 2)
    assert macro_f1(expected, expected, 3) == 1.0
    assert macro_f1(expected, np.full(5, UNKNOWN), 3) == 0.0


def test_macro_f1_is_that_of_scikit_learn_by_its_counts():
    random = np.random.default_rng(0)
    expected, given = random.integers(4, size=200), random.integers(-1, 4, size=200)
    by_label = []
    for label in range(4):
        hits = ((expected == label) & (given == label)).sum()
        precision, recall = hits / (given == label).sum(), hits / (expected == label).sum()
        by_label.append(2 * precision * recall / (precision + recall))
    assert macro_f1(expected, given, 4) == pytest.approx(np.mean(by_label))


def test_the_confusion_has_every_row_once_and_answers_that_are_no_label():
    questions = asked("a", "a", "b", "b")
    found = scores(questions, answered(questions, "a", "dunno", "", "a"), answered(questions, "a", "a", "b", "c"))
    base = {(each.expected, each.answered): each.rows for each in found.base.confusion}
    assert base == {("a", None): 1, ("a", "a"): 1, ("b", None): 1, ("b", "a"): 1}
    assert {(each.expected, each.answered): each.rows for each in found.tuned.confusion}[("b", "c")] == 1
    assert (found.labels, found.rows) == (("a", "b", "c"), {"a": 2, "b": 2, "c": 0})
    assert (found.base.unknown.value, found.tuned.unknown.value) == (0.5, 0.0)
    assert found.base.unknown.low < 0.5 < found.base.unknown.high
    assert found.tuned.macro_f1.value == pytest.approx((1 + 2 / 3) / 2)


def test_the_difference_is_paired_so_that_equal_models_have_none():
    questions = asked(*"aabbcc" * 10)
    texts = [*"abbbcc" * 10]
    same = scores(questions, answered(questions, *texts), answered(questions, *texts)).macro_f1_difference
    assert (same.value, same.low, same.high) == (0, 0, 0)
    right = answered(questions, *(question.expected for question in questions))
    better = scores(questions, answered(questions, *texts), right)
    assert 0 < better.macro_f1_difference.low < better.macro_f1_difference.value < better.macro_f1_difference.high
    assert better.base.macro_f1.low < better.base.macro_f1.value < better.base.macro_f1.high
    assert better.tuned.macro_f1.low == better.tuned.macro_f1.high == 1.0


def test_the_commonest_confusions_come_first_with_their_images_and_a_few_of_each():
    questions = asked(*"abbbbbc", image=image_bytes(300, 200))
    base = answered(questions, *"bbbbbbc")
    found = scores(questions, base, answered(questions, "no", *"ccccc", "c")).most_confused
    assert [row.row for row in found] == [2, 3, 4, 1]
    assert found[0].expected == "b" and found[0].tuned == "c" and found[0].base_right and not found[0].tuned_right
    assert len(found) == MOST_OF_ONE_KIND + 1
    assert all(url.startswith("data:image/jpeg;base64,") for row in found for url in row.images)


def test_their_number_is_limited_and_a_image_that_is_gone_is_left_out():
    questions = [
        Question(
            messages=(Message(role="user", parts=(ImagePart(path="/nowhere/a.png"),)),),
            expected=f"label {row}",
            origin="here",
        )
        for row in range(40)
    ]
    wrong = [GradedAnswer(text="x" * 1000, right=False, cut=False)] * 40
    found = scores(questions, wrong, wrong).most_confused
    assert len(found) == MOST_CONFUSED
    assert found[0].images == () and len(found[0].tuned) == 200


def test_text_rows_have_no_thumbnail():
    question = Question(messages=(text_message("user", "a"),), expected="a", origin="here")
    wrong = answered([question], "b")
    (row,) = scores([question], wrong, wrong).most_confused
    assert row.images == ()
