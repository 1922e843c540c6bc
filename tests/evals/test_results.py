"""What the record says of answers."""

from gemsmith.evals.results import choose_examples


def test_examples_show_what_was_fixed_what_stays_wrong_and_what_was_made_worse() -> None:
    fixed, wrong, worse, kept = (False, True), (False, False), (True, False), (True, True)
    outcomes = [*[kept] * 5, *[fixed] * 3, worse, *[wrong] * 3]
    rows = [{"row": row, "base_right": base, "tuned_right": tuned} for row, (base, tuned) in enumerate(outcomes, 1)]
    assert [row["row"] for row in choose_examples(rows)] == [6, 7, 10, 11, 9, 1, 2, 3]
    assert [row["row"] for row in choose_examples(rows[:5])] == [1, 2, 3, 4, 5]
    assert [row["row"] for row in choose_examples(rows[5:8])] == [6, 7, 8]


def test_a_row_without_an_answer_is_no_example() -> None:
    right = {"base_right": False, "tuned_right": False}
    rows = [{"row": number, **right, "base_failed": number == 1, "tuned_failed": number == 2} for number in range(1, 5)]
    assert [row["row"] for row in choose_examples(rows)] == [3, 4]
