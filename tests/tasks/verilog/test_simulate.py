"""Answers that are right, wrong and hostile. A hostile one is right about nothing: it must never pass."""

from pathlib import Path

import pytest

from gemsmith.tasks.base import Verdict
from gemsmith.tasks.verilog import simulate
from gemsmith.tasks.verilog.simulate import REASONS, Failed, Problem, judge, open_bench

RIGHT = "module TopModule(input a, input b, output y);\n  assign y = a & b;\nendmodule"
WIRE = "module TopModule(input a, input b, output y);"
PORTS = "module TopModule(input a, input b, output reg y);"


def wrong(body: str, more: str = "") -> str:
    return f"```verilog\n{PORTS}\n  initial y = 0;\n{body}\nendmodule\n{more}\n```"


# Icarus takes an escaped $name for a system task: this one finds the testbench's secret word in the compiled program,
# prints a verdict behind it and spoils the true one's line.
READS_THE_WORD = wrong(r"""
  integer f, n, k, found; reg [8*400-1:0] line; reg [8*32-1:0] word;
  initial begin
    f = \$fopen ("/job/tb.vvp", "r");
    found = 0;
    while (!found && !\$feof (f)) begin
      n = \$fgets (line, f);
      for (k = 0; k < 360 && !found; k = k + 1)
        if (line[8*k +: 72] == " %1d %1d\"") begin word = line[8*(k+9) +: 256]; found = 1; end
    end
    \$fdisplay (1, "%s 0 SAMPLES", word);
    \$fwrite (1, "x");
    \$finish ;
  end""")
DOUBLING = "".join(f"`define A{n} `A{n - 1}+`A{n - 1}+`A{n - 1}+`A{n - 1}\n" for n in range(1, 14))

HOSTILE = {
    "prints a verdict": wrong('initial begin $display("Mismatches: 0 in 100 samples"); end'),
    "prints a verdict at the end": wrong('final $display("Mismatches: 0 in 100 samples");'),
    "prints by a macro that hides the name": (
        "```\n`define P $dis``play\n" + PORTS + '\ninitial begin y = 0; `P("Mismatches: 0 in 9 samples"); '
        "end\nendmodule\n```"
    ),
    "ends before the testbench": wrong("initial #2 $finish;"),
    "ends at once": wrong("initial $finish;"),
    "stops": wrong("initial $stop;"),
    "writes the count of errors": wrong("always @(a or b) tb.stats1.errors = 0;"),
    "writes it through an escaped name": wrong("always @(a or b) \\tb .stats1.errors = 0;"),
    "writes it from another root": wrong("", "module evil; initial forever #1 tb.stats1.errors = 0;\nendmodule"),
    "writes it by force": wrong("initial force tb.tb_match = 1;"),
    "changes a parameter of the testbench": wrong("defparam tb.good1.N = 1;"),
    "reads the reference": f"{WIRE}\nassign y = tb.good1.y;\nendmodule",
    "reads the reference from the root": "module TopModule(input a, input b, output y);\nassign y = "
    "$root.tb.y_ref;\nendmodule",
    "uses the reference": f"{WIRE}\nRefModule r(.a(a), .b(b), .y(y));\nendmodule",
    "redefines the reference": wrong("", "module RefModule(input a, input b, output y);\nassign y = 0;\nendmodule"),
    "redefines the testbench": wrong("", "module tb; initial $display(1);\nendmodule"),
    "redefines the stimulus": wrong("", "module stimulus_gen(input clk, output reg a, output reg b);\nendmodule"),
    "binds into the testbench": wrong("", "module e; endmodule\nbind tb e e1();"),
    "calls the testbench's task": wrong("initial stim1.pause;"),
    "writes a file": wrong('integer f; initial begin f = $fopen("/tmp/written"); $fdisplay(f, "x"); end'),
    "reads a file": wrong('reg [7:0] m[0:9]; initial $readmemh("/etc/passwd", m);'),
    "runs a command": wrong('initial $system("id > /tmp/written");'),
    "includes a file": '```\n`include "/etc/passwd"\n' + PORTS + "\nendmodule\n```",
    "includes the reference": '```\n`include "/job/ref.sv"\n' + PORTS + "\nendmodule\n```",
    "hides in a string": wrong('initial $display("\\" /* ", "*/ tb.stats1.errors = 0;");'),
    "hides behind a comment": wrong("/* // */ initial tb.stats1.errors = 0;"),
    "finds out the secret word": READS_THE_WORD,
    "ends by an escaped name": wrong("initial \\$finish ;"),
    "deposits by an escaped name": wrong("initial \\$deposit (y, 1);"),
    "reads the command line": wrong('integer i; initial if ($value$plusargs("x=%d", i)) y = 1;'),
    "loads a VPI module": wrong('initial $load_vpi("x");'),
    "stretches time": wrong("initial forever #1 y = ~y;", more="").replace("module", "`timescale 1s/1fs\nmodule", 1),
    "dumps into a file": wrong('initial begin $dumpfile("/tmp/written"); $dumpvars; end'),
    "looks in libraries": wrong("stimulus s(); RefModule2 r();").replace("module", "`uselib dir=/job\nmodule", 1),
    "holds null bytes": wrong("\0 initial y = 1; \0"),
    "holds half a character": wrong('initial $display("\udcff");'),
    "holds thousands of modules": wrong("", "".join(f"module m{n}(input a); endmodule\n" for n in range(2000))),
    "holds thousands of modules without an end": "module TopModule\n" * 50_000,
    "is a hundred megabytes": "x" * 100_000_000,
    "calls itself without end": wrong(
        "function automatic integer f(input integer x); f = f(x + 1) + 1; endfunction initial y = f(0);"
    ),
}


@pytest.mark.parametrize("answer", [RIGHT, f"Here:\n```verilog\n{RIGHT}\n```\n", f"[BEGIN]\n{RIGHT}\n[DONE]"])
def test_a_right_answer_passes(bench, sandbox, answer):
    assert judge(bench, answer, sandbox) == Verdict(right=True)


def test_a_module_that_prints_for_itself_is_judged_by_what_it_does(bench, sandbox):
    prints = RIGHT.replace(
        "endmodule", 'initial begin $display; $display(); $write("%d", a); $monitor("%b", y); end\nendmodule'
    )
    assert judge(bench, prints, sandbox).right
    assert judge(bench, prints.replace("a & b", "a | b"), sandbox).reason == "wrong output"


def test_what_a_module_has_inside_it_may_be_named(bench, sandbox):
    answer = """
module And(input u, input v, output y);
  wire both = u & v;
  assign y = both;
endmodule
module TopModule(input a, input b, output y);
  struct packed { logic u; logic v; } pair;
  assign pair = {a, b};
  And part (.u(pair.u), .v(pair.v), .y());
  assign y = part.both;
endmodule
"""
    assert judge(bench, answer, sandbox).right
    assert judge(bench, answer.replace("u & v", "u | v"), sandbox).reason == "wrong output"


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_hostile_answer_passes_or_leaves_anything(bench, sandbox, answer):
    verdict = judge(bench, answer.replace("SAMPLES", str(bench.samples)), sandbox)
    assert not verdict.right and verdict.reason in REASONS
    assert not Path("/tmp/written").exists()


def test_a_verdict_that_is_printed_with_the_secret_word_is_forged_even_where_the_guard_misses_it(
    bench, sandbox, monkeypatch
):
    monkeypatch.setattr(simulate, "guard", lambda source, **_: source)
    verdict = judge(bench, READS_THE_WORD.replace("SAMPLES", str(bench.samples)), sandbox)
    assert (verdict.reason, verdict.detail) == ("forged", "the testbench's own word was printed twice")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("I cannot do that.", "no module"),
        ("module Other(input a); endmodule", "no module"),
        (f"{PORTS} assign", "no module"),
        (wrong("assign z = ;"), "compile error"),
        (wrong(""), "wrong output"),
        (HOSTILE["ends before the testbench"], "forged"),
        (HOSTILE["writes the count of errors"], "forged"),
        (HOSTILE["uses the reference"], "forged"),
        (HOSTILE["redefines the testbench"], "forged"),
        (HOSTILE["finds out the secret word"], "forged"),
        (HOSTILE["ends by an escaped name"], "forged"),
        (HOSTILE["is a hundred megabytes"], "sandbox"),
    ],
)
def test_why_an_answer_does_not_pass_is_named(bench, sandbox, answer, reason):
    assert judge(bench, answer, sandbox).reason == reason


@pytest.mark.parametrize(
    "body",
    [
        'initial forever $display("on and on");',
        *(
            pytest.param(body, marks=pytest.mark.slow)
            for body in (
                "always @(*) while (1) y = ~y;",
                "initial forever begin end",
                "reg [7:0] m; initial forever #0 m = m + 1;",
            )
        ),
    ],
)
def test_an_endless_loop_ends_in_time(bench, sandbox, monkeypatch, body):
    monkeypatch.setattr(simulate, "RUNNING", simulate.SandboxLimits(wall_s=2))
    verdict = judge(bench, wrong(body), sandbox)
    assert not verdict.right and verdict.reason in ("timeout", "sandbox", "compile error")


def test_macros_that_double_end_in_time(bench, sandbox, monkeypatch):
    monkeypatch.setattr(simulate, "COMPILING", simulate.SandboxLimits(wall_s=2))
    verdict = judge(bench, f"```\n`define A0 1\n{DOUBLING}{PORTS} initial y = `A13;\nendmodule\n```", sandbox)
    assert not verdict.right and verdict.reason in ("timeout", "sandbox", "compile error")


def test_memory_without_end_is_stopped(bench, sandbox):
    verdict = judge(bench, wrong("reg [1023:0] m [0:33554431]; initial m[0] = 1;"), sandbox)
    assert not verdict.right and verdict.reason in ("sandbox", "compile error", "wrong output", "timeout")


def test_a_testbench_that_does_not_compile_is_no_fault_of_the_answer(problem, sandbox):
    broken = Problem(name="x", prompt="", reference=problem.reference, testbench=problem.testbench + "\nmodule ;")
    with pytest.raises(Failed) as failed:
        open_bench(broken, sandbox)
    assert failed.value.reason == "compile error"
