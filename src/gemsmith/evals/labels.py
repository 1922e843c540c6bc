"""A classifier's scores beside its accuracy: macro-F1, answers that are no label, and what is taken for what."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from gemsmith.errors import DataError
from gemsmith.evals.generate import GradedAnswer
from gemsmith.evals.metrics import RESAMPLES, SEED, wilson_interval
from gemsmith.images.check import thumbnail_url
from gemsmith.runs.eval_records import Interval, LabelCount, LabelRow, LabelScores, LabelsResult
from gemsmith.tasks.base import Classifier, Question
from gemsmith.tasks.messages import images_of

UNKNOWN = -1  # stands for an answer that is no label
MOST_CONFUSED, MOST_OF_ONE_KIND, MOST_IMAGES = 24, 3, 4
_CHARACTERS = 200


def label_scores(
    scorer: Classifier, questions: Sequence[Question], base: Sequence[GradedAnswer], tuned: Sequence[GradedAnswer]
) -> LabelsResult:
    """Both models' scores on the same questions. An answer that did not come counts as one that is no label."""
    labels = tuple(scorer.list_labels(questions))
    place = {label: number for number, label in enumerate(labels)}

    def places(texts: Sequence[str]) -> np.ndarray:
        found = (scorer.find_label(text, labels) for text in texts)
        return np.array([UNKNOWN if label is None else place[label] for label in found], np.int64)

    expected = places([question.expected for question in questions])
    assert (expected != UNKNOWN).all(), "the expected answers are labels"
    answered = [places([answer.text for answer in model]) for model in (base, tuned)]

    def resample(places_: np.ndarray) -> np.ndarray:
        generator, rows = np.random.default_rng(SEED), len(expected)  # the same rows for both models
        drawn = (generator.integers(rows, size=rows) for _ in range(RESAMPLES))
        return np.array([macro_f1(expected[at], places_[at], len(labels)) for at in drawn])

    scores = [macro_f1(expected, each, len(labels)) for each in answered]
    resampled = list(map(resample, answered))
    return LabelsResult(
        labels=labels,
        rows=dict(zip(labels, np.bincount(expected, minlength=len(labels)).tolist(), strict=True)),
        base=_label_scores(labels, expected, answered[0], _quantiles(scores[0], resampled[0])),
        tuned=_label_scores(labels, expected, answered[1], _quantiles(scores[1], resampled[1])),
        macro_f1_difference=_quantiles(scores[1] - scores[0], resampled[1] - resampled[0]),
        most_confused=tuple(_most_confused(questions, base, tuned, expected, answered)),
    )


def macro_f1(expected: np.ndarray, answered: np.ndarray, labels: int) -> float:
    """The mean over labels of F1 = 2 hits / (rows of the label + answers of it), for labels that have rows.

    An answer that is no label, UNKNOWN, is one too few of the expected label and none of another.

    >>> macro_f1(np.array([0, 0, 1, 1]), np.array([0, 1, 1, UNKNOWN]), 3)
    0.5833333333333333
    """
    rows = np.bincount(expected, minlength=labels)
    given = np.bincount(answered[answered != UNKNOWN], minlength=labels)
    hits = np.bincount(expected[expected == answered], minlength=labels)
    there = rows > 0
    return float((2 * hits[there] / (rows + given)[there]).mean())


def _quantiles(value: float, resampled: np.ndarray) -> Interval:
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(value=value, low=float(low), high=float(high))


def _label_scores(labels: Sequence[str], expected: np.ndarray, answered: np.ndarray, f1: Interval) -> LabelScores:
    unknown = int((answered == UNKNOWN).sum())
    low, high = wilson_interval(unknown, len(answered))
    counts = Counter(zip(expected.tolist(), answered.tolist(), strict=True))
    confusion = (
        LabelCount(expected=labels[one], answered=None if other == UNKNOWN else labels[other], rows=rows)
        for (one, other), rows in sorted(counts.items())
    )
    share = Interval(value=unknown / len(answered), low=low, high=high)
    return LabelScores(macro_f1=f1, unknown=share, confusion=tuple(confusion))


def _most_confused(
    questions: Sequence[Question],
    base: Sequence[GradedAnswer],
    tuned: Sequence[GradedAnswer],
    expected: np.ndarray,
    answered: Sequence[np.ndarray],
) -> Iterator[LabelRow]:
    """Rows that the tuned model gets wrong, those of its commonest confusions first; then those that the base does."""
    seen: set[int] = set()
    for model, places in ((tuned, answered[1]), (base, answered[0])):
        kinds = list(zip(expected.tolist(), places.tolist(), strict=True))
        wrong = [row for row, answer in enumerate(model) if not answer.right and row not in seen]
        common, taken = Counter(kinds[row] for row in wrong), Counter[tuple[int, int]]()
        for row in sorted(wrong, key=lambda row: (-common[kinds[row]], kinds[row], row)):
            if len(seen) < MOST_CONFUSED and taken[kinds[row]] < MOST_OF_ONE_KIND:
                taken[kinds[row]] += 1
                seen.add(row)
                yield LabelRow(
                    row=row + 1,
                    origin=questions[row].origin,
                    expected=questions[row].expected,
                    base=base[row].text[:_CHARACTERS],
                    tuned=tuned[row].text[:_CHARACTERS],
                    base_right=base[row].right,
                    tuned_right=tuned[row].right,
                    images=tuple(thumbnails(questions[row])),
                )


def thumbnails(question: Question) -> Iterator[str]:
    """Its first images as small data: URLs, without those whose files are gone."""
    for part in images_of(question.messages)[:MOST_IMAGES]:
        with contextlib.suppress(DataError):  # the answers are what counts
            yield thumbnail_url(part.source)
