"""Examples: which words are marked."""

from gemsmith.report.scores import MOST_CHARACTERS, MOST_EXAMPLES, marked_text, plain_text, read_examples
from gemsmith.runs.eval_records import EvalRecord


def read(**example):
    return read_examples(EvalRecord.model_construct(examples=(example,)))[0]


def marked(text):
    return [words for same, words in text.parts if not same]


def test_words_that_are_not_as_expected_are_marked_one_by_one():
    text = marked_text("assign y = a - b;\nassign z = q;", "assign y = a + b;\nassign z = p;")
    assert marked(text) == ["-", "q"]
    assert "".join(words for _, words in text.parts) == "assign y = a - b;\nassign z = q;"


def test_a_right_answer_has_no_mark_and_a_wrong_one_is_held_against_what_was_expected():
    example = read(expected="a b", base="a c", tuned="a b", base_right=False, tuned_right=True)
    assert [marked(answer["text"]) for answer in example["answers"]] == [["c"], []]


def test_without_an_expected_answer_base_and_tuned_are_held_against_each_other():
    example = read(expected="", base="x = 1;", tuned="x <= 1;", base_right=False, tuned_right=True)
    assert example["expected"] is None
    assert [marked(answer["text"]) for answer in example["answers"]] == [[], ["<"]]


def test_long_texts_are_cut_and_counted_and_many_examples_left_out():
    assert plain_text("x" * (MOST_CHARACTERS + 7)).omitted == 7
    assert marked_text("x " * MOST_CHARACTERS, "").omitted == MOST_CHARACTERS
    record = EvalRecord.model_construct(examples=({"prompt": "p"},) * (MOST_EXAMPLES + 3))
    assert len(read_examples(record)) == MOST_EXAMPLES
