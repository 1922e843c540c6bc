"""Scores: every task, every problem, differences with their p-values, and lm-evaluation-harness."""

import pytest

from gemsmith.analysis.summary import read_findings
from gemsmith.report import scores
from gemsmith.report.page import render_page
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.run import read_record, write_record
from gemsmith.system.format import fraction, signed


@pytest.fixture
def words(large_run, section_words):
    return section_words(large_run, "scores")


def test_every_task_has_its_scores_and_its_difference(large_run, words):
    for task in read_record(large_run, EvalRecord).tasks:
        base, tuned = (
            f"{fraction(score.score)} ({fraction(score.low)}–{fraction(score.high)})"
            for score in (task.base.score, task.tuned.score)
        )
        assert f"{task.task} score {base} {tuned}" in words
        found = task.difference
        interval = f"{signed(found.low)} to {signed(found.high)}"
        row = f"{task.task} {found.questions} {signed(found.mean)} {interval} p < 0.001 61 12 yes"
        assert row in words, row
    assert "pass@5" in words and "pass@1 " not in words


def test_every_problem_is_paired_by_its_name(large_run, words, undrawn):
    record = read_record(large_run, EvalRecord).tasks[0]
    (task, *_) = scores.make_scores(read_findings(large_run))["tasks"]
    assert len(task["problems"]) == 156
    shuffled = record.model_copy(
        update={"base": record.base.model_copy(update={"problems": record.base.problems[::-1]})}
    )
    assert scores._task(shuffled)["problems"] == task["problems"]
    better = sum(tuned.passed > base.passed for base, tuned in task["problems"])
    assert f"{better} pass more often than with the base" in words
    for base, tuned in task["problems"]:
        assert f"{tuned.name} {base.passed} of 5 {tuned.passed} of 5" in words
    for right in range(6):
        numbers = [sum(pair[index].passed == right for pair in task["problems"]) for index in (0, 1)]
        assert f"{right} of 5 {numbers[0]} {numbers[1]}" in words


def test_answers_are_counted_beside_the_scores(words):
    assert "answers asked for 780 780" in words and "output tokens, mean 311 311" in words
    assert "requests sent again 1 server died 1 server died" in words


def test_scores_of_lm_evaluation_harness_have_their_errors(words):
    assert "arc_easy acc 0.791 ± 0.0157 0.791 ± 0.0157 2,376" in words
    assert "arc_easy acc_norm 0.770 0.770 2,376" in words


def test_a_damaged_record_of_lm_evaluation_harness_is_told(make_run, section_words):
    run = make_run(steps=2)
    assert "lm-evaluation-harness" not in section_words(run, "scores")
    run.record_file("lm_eval").write_text('{"schema_version": 1, "ta')
    assert "lm_eval.json: is not a record of this version" in section_words(run, "scores")


def test_examples_say_what_training_did_to_them_and_show_their_images(make_run, section_words):
    run = make_run(steps=2)
    record = read_record(run, EvalRecord)
    images = ["data:image/jpeg;base64,AAAA", "https://example.com/a.jpg", "data:image/svg+xml,<svg>"]
    update = {"base_right": True, "tuned_right": False, "thumbnails": images}
    examples = (record.examples[0] | update, *record.examples[1:])
    write_record(run, record.model_copy(update={"examples": examples}))
    words = section_words(run, "scores")
    assert (
        words.index("3 examples") < words.index("1 made worse") < words.index("2 still wrong") < words.index("3 fixed")
    )
    assert words.index("3 fixed") < words.index("tuned less base")
    page = render_page(run)
    assert page.count("<img") == 1 and f'<img src="{images[0]}" alt="of example 1">' in page


def test_on_a_narrow_screen_each_score_stands_under_the_name_of_its_column(make_run, undrawn):
    assert '<td data-label="tuned">0.940 (0.898–0.965)</td>' in render_page(make_run(steps=2))
