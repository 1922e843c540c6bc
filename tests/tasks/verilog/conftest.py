"""A problem in verilog-eval's form: y is a and b, or with `clk` a and b one clock later."""

import shutil
from pathlib import Path

import pytest

from gemsmith.errors import MachineError
from gemsmith.system.sandbox import Sandbox, find_sandbox
from gemsmith.tasks.verilog.simulate import Problem, Testbench, open_bench

PROMPT = "I would like you to implement a module named TopModule: input a, input b, output y. y is a and b.\n"
REFERENCE = """
module RefModule (input a, input b, output y);
  assign y = a & b;
endmodule
"""
TESTBENCH = """
`timescale 1 ps/1 ps

module stimulus_gen (input clk, output reg a, output reg b);
  task pause;
    #1;
  endtask
  initial begin
    {a, b} = 0;
    repeat (40) @(posedge clk, negedge clk) {a, b} <= $random;
    pause;
    #1 $finish;
  end
endmodule

module tb();
  typedef struct packed {
    int errors;
    int clocks;
  } stats;
  stats stats1;
  reg clk = 0;
  initial forever #5 clk = ~clk;
  logic a, b, y_ref, y_dut;
  initial begin
    $dumpfile("wave.vcd");
    $dumpvars(1, clk, y_ref, y_dut);
  end
  wire tb_match = y_ref === (y_ref ^ y_dut ^ y_ref);
  stimulus_gen stim1 (.clk, .*);
  RefModule good1 (.a, .b, .y(y_ref));
  TopModule top_module1 (.a, .b, .y(y_dut));
  final begin
    $display("Mismatches: %1d in %1d samples", stats1.errors, stats1.clocks);
  end
  always @(posedge clk, negedge clk) begin
    stats1.clocks++;
    if (!tb_match) stats1.errors++;
  end
  initial begin
    #1000000
    $display("TIMEOUT");
    $finish();
  end
endmodule
"""


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    if not (shutil.which("bwrap") and shutil.which("iverilog")):
        pytest.skip("bubblewrap and iverilog are not installed")
    try:
        return find_sandbox()
    except MachineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def problem() -> Problem:
    return Problem(name="Prob001_and", prompt=PROMPT, reference=REFERENCE, testbench=TESTBENCH)


@pytest.fixture(scope="session")
def bench(problem: Problem, sandbox: Sandbox) -> Testbench:
    return open_bench(problem, sandbox)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset_spec-to-rtl"
    folder.mkdir()
    for name in ("Prob001_and", "Prob002_and"):
        (folder / f"{name}_prompt.txt").write_text(PROMPT)
        (folder / f"{name}_ref.sv").write_text(REFERENCE)
        (folder / f"{name}_test.sv").write_text(TESTBENCH)
    return folder
