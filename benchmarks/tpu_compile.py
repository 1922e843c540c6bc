"""Compiles the training step for TPUs that are not there and reads its costs from the compiled program.

python benchmarks/tpu_compile.py --walk FILE.hlo --chip v5p
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gemsmith.hardware import load_catalogue
from gemsmith.plan.costs import KINDS, Costs, walk


def print_costs(costs: Costs, *, rows: int) -> None:
    console = Console(width=170)
    console.print(
        f"{costs.chip}: step {1e3 * costs.step_low_s:.0f} ms with collectives hidden, {1e3 * costs.step_high_s:.0f} as scheduled, "
        f"{1e3 * costs.step_serial_s:.0f} with all exposed"
    )
    console.print(", ".join(f"{kind} {1e3 * costs.seconds(kind):.1f} ms" for kind in KINDS))
    console.print(f"per chip: matmuls {costs.matmul_flops / 1e12:.2f} TFLOP, kernels {costs.kernel_flops / 1e12:.2f} TFLOP")
    for each in costs.unpriced:
        console.print(f"not priced: {each}")
    table = Table("kind", "name", "runs", "exposed ms", "busy ms", "TFLOP", "GB", "result", "from", box=None)
    for each in costs.most_expensive(rows):
        cells = (f"{1e3 * each.exposed_s:.2f}", f"{1e3 * each.busy_s:.2f}", f"{each.flops / 1e12:.3f}", f"{each.bytes / 1e9:.2f}")
        table.add_row(each.kind, each.name, str(each.count), *cells, each.result[:40], each.op_name[-60:])
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walk", type=Path, metavar="FILE.hlo", help="print the costs of a compiled program's text")
    parser.add_argument("--chip", default="v5p", help="the chip that --walk takes it to run on")
    parser.add_argument("--rows", type=int, default=25, help="how many of the most expensive operations are printed")
    options = parser.parse_args()
    print_costs(walk(options.walk.read_text(), load_catalogue().chips[options.chip]), rows=options.rows)


if __name__ == "__main__":
    main()
