"""What the record says of answers."""

from gemsmith.evals.results import choose_examples


def test_examples_show_some_that_are_wrong_and_some_that_are_right() -> None:
    rows = [{"row": number, "tuned_right": number < 8} for number in range(1, 11)]
    assert [row["row"] for row in choose_examples(rows)] == [1, 2, 3, 8, 9]
    assert [row["row"] for row in choose_examples(rows[:6])] == [1, 2, 3, 4, 5]
    assert [row["row"] for row in choose_examples(rows[7:])] == [8, 9, 10]


def test_a_row_without_an_answer_is_no_example() -> None:
    rows = [
        {"row": number, "tuned_right": False, "base_failed": number == 1, "tuned_failed": number == 2}
        for number in range(1, 5)
    ]
    assert [row["row"] for row in choose_examples(rows)] == [3, 4]
