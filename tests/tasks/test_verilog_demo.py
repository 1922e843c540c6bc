import pytest

from gemsmith.tasks.base import Question
from gemsmith.tasks.verilog.demo import (
    generate_rows,
    make_specs,
    normalise_module,
    score,
    split_of,
    write_module,
    write_prompt,
)


def test_verilog_exact_ignores_spacing_and_comments_and_nothing_else() -> None:
    expected = "module m(input a, output y);\n  assign y = ~a;\nendmodule"
    answers = [
        "Here it is:\nmodule m( input a, output y );  // one\nassign y=~a; /* two */\nendmodule\n",
        expected.replace("~a", "a"),
        "",
    ]
    question = Question(messages=(), expected=expected, origin="here")
    assert [verdict.right for verdict in score(question, answers)] == [True, False, False]


@pytest.mark.parametrize("text", ["", "module", "endmodule module", "/* never ended", "module é endmodule\x00"])
def test_any_text_has_a_normal_form_that_stays(text: str) -> None:
    assert normalise_module(normalise_module(text)) == normalise_module(text)


def test_a_row_asks_for_a_specification_of_its_split_and_answers_with_its_module() -> None:
    spec = next(make_specs("held-out", 0))
    assert split_of(spec) == "held-out"
    assert generate_rows(1, "held-out", 0) == [{"prompt": write_prompt(spec), "response": write_module(spec)}]
