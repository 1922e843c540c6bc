"""What counts as the same problem, as near, and as only the same boilerplate."""

import pytest

from gemsmith.data.dedup import build_index, find_match
from gemsmith.data.prepare import SharedRow

BEGIN = "I would like you to implement a module named TopModule with the following interface."
SPECS = {
    "count": f"{BEGIN} It counts the rising edges of clk in a four bit register q, and starts again after nine.",
    "parity": f"{BEGIN} Its output is the even parity of the eight bits of the vector in, as one bit called odd.",
    "shift": f"{BEGIN} A shift register of sixteen stages takes in its bit d at each clock and gives the oldest.",
    "mux": f"{BEGIN} It gives one of the four inputs a, b, c and d as y, whichever the two bits of sel tell it to.",
}
MODULES = {
    "count": "module RefModule (input clk, output reg [3:0] q); // nine\n"
    "always @(posedge clk) q <= q == 9 ? 0 : q + 1; endmodule",
    "wire": "module RefModule (input a, output y); assign y = a; endmodule",
}


def matches(kind: str, text: str) -> SharedRow | None:
    return find_match(build_index(kind, SPECS if kind == "specification" else MODULES), "row", text)


def shared(kind: str, problem: str, *, exact: bool) -> SharedRow:
    return SharedRow(row="row", problem=problem, kind=kind, exact=exact, share=1.0)


def test_the_same_words_are_exact_whatever_their_case_and_spacing() -> None:
    text = SPECS["parity"].upper().replace(" ", "\n  ")
    assert matches("specification", text) == shared("specification", "parity", exact=True)


def test_the_same_code_is_exact_whatever_its_name_comments_and_spacing() -> None:
    text = "module count10(input clk,output reg[3:0]q);/* a\nb */always@(posedge clk)q<=q==9?0:q+1;\nendmodule"
    assert matches("module", text) == shared("module", "count", exact=True)
    assert matches("module", text.replace("9", "8")) is None or not matches("module", text.replace("9", "8")).exact


def test_a_specification_inside_a_longer_one_is_near() -> None:
    found = matches("specification", f"Please help. {SPECS['count']} Write it in Verilog, without a latch.")
    assert found == shared("specification", "count", exact=False)
    half = " ".join(SPECS["count"].split()[13:])
    assert matches("specification", half) is not None


def test_what_all_problems_begin_with_is_no_match() -> None:
    assert matches("specification", f"{BEGIN} It adds two numbers and gives their sum and carry.") is None


def test_a_problem_of_few_tokens_is_compared_exactly_alone() -> None:
    small = MODULES["wire"]
    assert matches("module", small.replace("RefModule", "w")) == shared("module", "wire", exact=True)
    assert build_index("module", {"tiny": "module t; endmodule"}).sizes == {}


@pytest.mark.parametrize("kind", ["specification", "module"])
def test_an_empty_text_is_like_none(kind: str) -> None:
    assert matches(kind, "") is None
