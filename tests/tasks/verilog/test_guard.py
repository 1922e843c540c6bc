import time

import pytest

from gemsmith.tasks.verilog.simulate import Failed, guard, scope_names
from support.cases import each

TESTBENCH = """
module stimulus_gen(input clk); task pause; #1; endtask endmodule
module tb(); stimulus_gen stim1(.clk); initial begin : main end endmodule
"""
MODULES, SCOPES = scope_names(TESTBENCH, "module RefModule(input a); endmodule")


def supervised(body: str) -> str:
    return guard(f"module TopModule(input a, output y);\n{body}\nendmodule", modules=MODULES, scopes=SCOPES)


def test_modules_tasks_instances_and_named_blocks_of_the_testbench_are_scopes():
    assert {"stimulus_gen", "tb", "RefModule"} == MODULES
    assert {*MODULES, "stim1", "pause", "main"} <= SCOPES and "a" not in SCOPES


@pytest.mark.parametrize(
    "body",
    [
        "assign y = a;",
        "sub part(.a(a), .y(y));",
        "pair both; assign y = both.u & both[0].v;",
        "assign y = $signed(a) >>> $clog2(4);",
    ],
)
def test_a_module_that_keeps_to_itself_is_left_as_it_is(body):
    assert body in supervised(body)


@each(
    ("body", "message"),
    [
        ("RefModule r(.a(a));", "it names RefModule, a module of the testbench or the reference"),
        ("\\RefModule r(.a(a));", "it names RefModule"),
        ("initial tb.clk = 0;", "it names tb"),
        ("initial stim1.clk = 0;", "it reaches into the testbench through stim1"),
        ("initial stim1 . pause;", "it reaches into the testbench through stim1"),
        ("initial main[0].x = 0;", "it reaches into the testbench through main"),
        ("initial force y = 1;", "it uses force, which changes other modules"),
        ("initial $finish;", "it uses $finish, which a module under test has no need of"),
        ('initial $display("a\n");', "could be read in two ways"),
        ("assign y = a;\x00", "could be read in two ways"),
        ("/* assign y = a;", "could be read in two ways"),
        ("initial \\$finish ;", "it uses \\$finish, an escaped name of a system task"),
        ('`include "x"', "it uses `include, which is still there after the preprocessor"),
        ("initial stim1[a[0]].b[1].c = 0;", "it reaches into the testbench through stim1"),
        ("initial (a).b.c = 0;", "it reaches into the testbench through an expression"),
    ],
)
def test_a_module_that_reaches_beyond_itself_is_refused_with_how(body, message):
    with pytest.raises(Failed) as refused:
        supervised(body)
    assert message in str(refused.value) and refused.value.reason == "forged"


def test_what_prints_is_made_to_print_to_no_channel():
    assert '$fdisplay(0, "Mismatches: 0")' in supervised('initial $display("Mismatches: 0");')
    assert "$fdisplay(0);" in supervised("initial $write;")
    assert "$fdisplay(0)" in supervised("initial $strobe();")


def test_comments_are_gone_and_strings_hide_nothing():
    text = supervised('// tb.clk\n/* $finish */ parameter s = "// tb.stats1 /*"; assign y = a;')
    assert "$finish" not in text and "tb.clk" not in text and '"// tb.stats1 /*"' in text


def test_a_path_of_twenty_thousand_points_is_walked_once():
    begin = time.process_time()
    supervised("assign y = z" + "[z[0]].a" * 20_000 + ";")
    assert time.process_time() - begin < 5
