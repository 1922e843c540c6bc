"""What the page says of a classifier."""

import html
from collections.abc import Callable

import pytest

from gemsmith.images.check import thumbnail_url
from gemsmith.report.page import render_page
from gemsmith.report.scores import MOST_LABELS, NO_LABEL, OTHERS, label_matrix
from gemsmith.runs.eval_records import (
    Difference,
    EvalRecord,
    Interval,
    LabelCount,
    LabelRow,
    LabelScores,
    LabelsResult,
    ModelResult,
    TaskResult,
)
from gemsmith.runs.run import Run, read_record, write_record
from support.images import image_bytes

HOSTILE = "<script>alert('x')</script>"


def labels_result(
    counts: dict[tuple[str, str | None], int], *, labels: tuple[str, ...], confused: tuple[LabelRow, ...] = ()
) -> LabelsResult:
    one = Interval(value=0.5, low=0.4, high=0.6)
    confusion = tuple(LabelCount(expected=a, answered=b, rows=rows) for (a, b), rows in counts.items())
    scores = LabelScores(macro_f1=one, unknown=one, confusion=confusion)
    rows = {label: sum(n for (expected, _), n in counts.items() if expected == label) for label in labels}
    return LabelsResult(
        labels=labels, rows=rows, base=scores, tuned=scores, macro_f1_difference=one, most_confused=confused
    )


def test_each_row_of_the_matrix_is_one_label_and_its_shares_are_of_that() -> None:
    found = labels_result({("a", "a"): 3, ("a", "b"): 1, ("b", None): 2}, labels=("a", "b", "c"))
    base, tuned = (label_matrix(found, model) for model in ("base", "tuned"))
    assert (base["model"], tuned["model"]) == ("base", "tuned") and base["answered"] == ("a", "b", "c", NO_LABEL)
    lines = {line: [(rows, share) for rows, share, _ in cells] for line, cells in base["lines"]}
    assert lines == {"a": [(3, 0.75), (1, 0.25), (0, 0), (0, 0)], "b": [(0, 0), (0, 0), (0, 0), (2, 1.0)]}
    assert [right for *_, right in dict(base["lines"])["a"]] == [True, False, False, False]


def test_beyond_the_largest_labels_the_others_are_one() -> None:
    names = tuple(f"label {number:02}" for number in range(MOST_LABELS + 5))
    counts: dict[tuple[str, str | None], int] = {(name, name): 100 - 5 * number for number, name in enumerate(names)}
    counts |= {(names[0], names[-1]): 7, (names[-1], names[-2]): 2, (names[-1], names[0]): 4}
    base = label_matrix(labels_result(counts, labels=names), "base")
    assert len(base["lines"]) == MOST_LABELS + 1 and base["answered"][-2:] == (OTHERS, NO_LABEL)
    assert sum(rows for _, cells in base["lines"] for rows, *_ in cells) == sum(counts.values())
    first, others = dict(base["lines"])[names[0]], dict(base["lines"])[OTHERS]
    assert first[-2][0] == 7 and not others[-2][2], "some of them are taken for each other"


@pytest.fixture
def classified(make_run: Callable[..., Run], undrawn: None) -> Run:
    run = make_run()
    record = read_record(run, EvalRecord)
    row = LabelRow(
        row=3,
        origin=f"sphynx/{HOSTILE}.jpg",
        expected="sphynx",
        base=HOSTILE,
        tuned="great dane",
        base_right=False,
        tuned_right=False,
        images=(thumbnail_url(image_bytes(640, 480)),),
    )
    gone = row.model_copy(update={"images": (), "row": 4, "tuned_right": True})
    outside = row.model_copy(update={"images": ("https://example.com/a.jpg",), "row": 5})
    counts = {("sphynx", "great dane"): 5, ("great dane", "great dane"): 6, ("sphynx", None): 1}
    difference = Difference(
        mean=0, low=0, high=0, p_value=1, significant=False, questions=12, better=0, worse=0,
        sample_size_for_2pp=None, summary="Alike.",
    )  # fmt: skip
    task = TaskResult(
        task="labels", samples=1, temperature=0, top_p=1, seed=0, max_tokens=8, questions_sha256="0" * 64,
        base=ModelResult(score=record.base, answers=12), tuned=ModelResult(score=record.tuned, answers=12),
        difference=difference,
        labels=labels_result(counts, labels=("great dane", "sphynx"), confused=(row, gone, outside)),
    )  # fmt: skip
    write_record(run, record.model_copy(update={"scorer": "labels", "tasks": (task,)}))
    return run


def test_the_page_shows_the_matrices_and_the_images_that_are_taken_for_something_else(classified: Run) -> None:
    page = render_page(classified)
    section = page[page.index('<section id="labels">') : page.index('<section id="training">')]
    assert section.count('class="confusion"') == 2 and "macro-F1" in section
    assert section.count('<img src="data:image/jpeg;base64,') == 1 and "example.com" not in page
    assert section.count("no image, or it was gone") == 2
    assert html.escape(HOSTILE, quote=False).partition("'")[0] in section and HOSTILE not in page
    assert "✕ great dane" in section and "✓ great dane" in section
    assert len(page) < 3_000_000


def test_a_page_of_many_thumbnails_stays_small() -> None:
    from gemsmith.evals.labels import MOST_CONFUSED, MOST_IMAGES

    noise = len(thumbnail_url(image_bytes(500, 500)))
    assert MOST_CONFUSED * MOST_IMAGES * noise < 1_000_000


def test_a_run_that_classifies_nothing_has_no_such_section(make_run: Callable[..., Run], undrawn: None) -> None:
    assert "taken for what" not in render_page(make_run())
