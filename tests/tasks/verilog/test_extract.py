import time

import pytest

from gemsmith.tasks.verilog.simulate import extract_modules

TOP = "module TopModule(input a, output y);\n  assign y = a;\nendmodule"
PART = "module Part(input a, output y);\n  assign y = ~a;\nendmodule"


@pytest.mark.parametrize(
    "answer",
    [
        TOP,
        f"Here it is:\n\n{TOP}\n\nI hope that it helps.",
        f"```verilog\n{TOP}\n```",
        f"~~~\n{TOP}\n~~~\nDone.",
        f"```systemverilog\n{TOP}\n",
        f"[BEGIN]\n{TOP}\n[DONE]\n",
        f"```\nnothing here\n```\n{TOP}\n",
    ],
)
def test_the_module_is_found_whatever_is_around_it(answer):
    assert extract_modules(answer) == f"{TOP}\n"


@pytest.mark.parametrize("answer", ["", "I cannot.", PART, TOP.removesuffix("endmodule"), TOP.replace("Top", "top")])
def test_an_answer_without_a_whole_top_module_has_none(answer):
    assert extract_modules(answer) is None


def test_of_several_versions_the_last_one_counts_with_the_parts_that_it_lacks():
    better = TOP.replace("= a", "= a & a")
    answer = (
        f"```\n{PART}\n{TOP}\n```\nBetter:\n```\n{better}\n```\nAn example of another:\n```\nmodule x; endmodule\n```"
    )
    assert extract_modules(answer) == f"{PART}\nmodule x; endmodule\n{better}\n"


def test_directives_in_front_of_a_module_stay_with_it_and_prose_does_not():
    assert extract_modules(f"Note:\n`timescale 1ns/1ps\nas asked\n{TOP}") == f"`timescale 1ns/1ps\n{TOP}\n"


def test_modules_without_an_end_are_read_once():
    begin = time.process_time()
    assert extract_modules("module TopModule\n(*\n" * 40_000) is None
    assert time.process_time() - begin < 5


def test_an_attribute_in_front_of_a_module_stays_with_it():
    assert extract_modules(f"(* keep *)\n{TOP}\nmacromodule x; endmodule") == (
        f"(* keep *)\n{TOP}\nmacromodule x; endmodule\n"
    )
