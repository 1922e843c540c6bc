"""A classifier's scores beside its accuracy: macro-F1, answers that are no label, and what is taken for what."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gemsmith.errors import DataError
from gemsmith.evals.metrics import RESAMPLES, SEED, wilson_interval
from gemsmith.images.data_url import thumbnail_url
from gemsmith.runs.eval_records import Interval, LabelCount, LabelRow, LabelScores, LabelsResult
from gemsmith.tasks import Classifier, Question
from gemsmith.tasks.messages import images_of

UNKNOWN = -1
MOST_CONFUSED, MOST_OF_ONE_KIND, MOST_IMAGES = 24, 3, 4
_CHARACTERS = 200


class Answered(NamedTuple):
    """What one model wrote to each question, and which were right."""

    texts: Sequence[str]
    right: Sequence[bool]


def label_scores(scorer: Classifier, questions: Sequence[Question], base: Answered, tuned: Answered) -> LabelsResult:
    """Both models' scores on the same questions. An answer that did not come counts as one that is no label."""
    labels = tuple(scorer.list_labels(questions))
    place = {label: number for number, label in enumerate(labels)}
    expected = _places(scorer, labels, [question.expected for question in questions], place)
    assert (expected != UNKNOWN).all(), "the expected answers are labels"
    answered = [_places(scorer, labels, model.texts, place) for model in (base, tuned)]
    scores, drawn = zip(*(_macro_f1(expected, each, len(labels)) for each in answered), strict=True)
    return LabelsResult(
        labels=labels,
        rows={label: int(count) for label, count in zip(labels, _count(expected, len(labels)), strict=True)},
        base=_scores(labels, expected, answered[0], scores[0], drawn[0]),
        tuned=_scores(labels, expected, answered[1], scores[1], drawn[1]),
        macro_f1_difference=_interval(scores[1] - scores[0], drawn[1] - drawn[0]),
        most_confused=tuple(_most_confused(questions, base, tuned, expected, answered)),
    )


def macro_f1(expected: np.ndarray, answered: np.ndarray, labels: int) -> float:
    """The mean over labels of F1 = 2 hits / (rows of the label + answers of it), for labels that have rows.

    An answer that is no label, UNKNOWN, is one too few of the expected label and none of another.

    >>> macro_f1(np.array([0, 0, 1, 1]), np.array([0, 1, 1, UNKNOWN]), 3)
    0.5833333333333333
    """
    rows, given = _count(expected, labels), _count(answered[answered != UNKNOWN], labels)
    hits = _count(expected[expected == answered], labels)
    there = rows > 0
    return float((2 * hits[there] / (rows + given)[there]).mean())


def _places(scorer: Classifier, labels: Sequence[str], texts: Sequence[str], place: dict[str, int]) -> np.ndarray:
    found = (scorer.find_label(text, labels) for text in texts)
    return np.array([UNKNOWN if label is None else place[label] for label in found], np.int64)


def _count(places: np.ndarray, labels: int) -> np.ndarray:
    return np.bincount(places, minlength=labels)


def _macro_f1(expected: np.ndarray, answered: np.ndarray, labels: int) -> tuple[float, np.ndarray]:
    """The score, and that of each of RESAMPLES resamples of the rows: the same ones for both models."""
    generator, rows = np.random.default_rng(SEED), len(expected)
    chosen = (generator.integers(rows, size=rows) for _ in range(RESAMPLES))
    drawn = [macro_f1(expected[rows_], answered[rows_], labels) for rows_ in chosen]
    return macro_f1(expected, answered, labels), np.array(drawn)


def _interval(value: float, drawn: np.ndarray) -> Interval:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(value=value, low=float(low), high=float(high))


def _scores(
    labels: Sequence[str], expected: np.ndarray, answered: np.ndarray, score: float, drawn: np.ndarray
) -> LabelScores:
    unknown = int((answered == UNKNOWN).sum())
    low, high = wilson_interval(unknown, len(answered))
    counts = Counter(zip(expected.tolist(), answered.tolist(), strict=True))
    confusion = (
        LabelCount(expected=labels[one], answered=None if other == UNKNOWN else labels[other], rows=rows)
        for (one, other), rows in sorted(counts.items())
    )
    return LabelScores(
        macro_f1=_interval(score, drawn),
        unknown=Interval(value=unknown / len(answered), low=low, high=high),
        confusion=tuple(confusion),
    )


def _most_confused(
    questions: Sequence[Question], base: Answered, tuned: Answered, expected: np.ndarray, answered: Sequence[np.ndarray]
) -> Iterator[LabelRow]:
    """Rows that the tuned model gets wrong, those of its commonest confusions first; then those that the base does."""
    left = MOST_CONFUSED
    seen: set[int] = set()
    for model, places in ((tuned, answered[1]), (base, answered[0])):
        kinds = list(zip(expected.tolist(), places.tolist(), strict=True))
        wrong = [row for row, right in enumerate(model.right) if not right and row not in seen]
        common, taken = Counter(kinds[row] for row in wrong), Counter[tuple[int, int]]()
        for row in sorted(wrong, key=lambda row: (-common[kinds[row]], kinds[row], row)):
            if left and taken[kinds[row]] < MOST_OF_ONE_KIND:
                taken[kinds[row]] += 1
                left -= 1
                seen.add(row)
                yield _label_row(questions[row], row, base, tuned)


def _label_row(question: Question, row: int, base: Answered, tuned: Answered) -> LabelRow:
    return LabelRow(
        row=row + 1,
        origin=question.origin,
        expected=question.expected,
        base=base.texts[row][:_CHARACTERS],
        tuned=tuned.texts[row][:_CHARACTERS],
        base_right=base.right[row],
        tuned_right=tuned.right[row],
        images=tuple(_thumbnails(question)),
    )


def _thumbnails(question: Question) -> Iterator[str]:
    for part in images_of(question.messages)[:MOST_IMAGES]:
        with contextlib.suppress(DataError):  # a file that is gone since: the answers are what counts
            yield thumbnail_url(part.path or part.data)
