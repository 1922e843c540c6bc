"""The server: what it was started with and said of itself; the load test: every length, every cell, and its metrics."""

import shlex
from collections.abc import Sequence
from typing import Any

from gemsmith.analysis.summary import RunRecords, fastest_cell, saturation_rate
from gemsmith.report.bench_charts import load_charts, load_of
from gemsmith.runs.bench_records import BenchCell, BenchRecord
from gemsmith.runs.records import ServerFacts
from gemsmith.system.format import count

_NAMES = {
    "version": "vLLM",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "KV cache dtype",
    "tensor_parallel": "tensor parallel",
    "data_parallel": "data parallel",
    "max_model_len": "longest context, tokens",
    "chunked_prefill": "chunked prefill",
    "prefix_caching": "prefix caching",
    "kv_blocks": "KV blocks",
    "kv_block_tokens": "tokens of a KV block",
    "kv_cache_tokens": "tokens that the KV cache holds",
}


def make_use(findings: RunRecords) -> dict[str, Any]:
    """The run directory as a word of a command, and the tokens of prompt and answer that a server takes at once."""
    server, settings = findings.serve and findings.serve.server, findings.run.recipe.serve
    context = server.max_model_len if server and server.max_model_len else settings.max_model_len
    return {"folder": shlex.quote(findings.run.path.resolve().name), "context": context}


def make_serve(findings: RunRecords) -> dict[str, Any]:
    """`servers`: which stages' server -> name -> value in words; stages whose servers said the same share one."""
    told: dict[ServerFacts, list[str]] = {}
    for stage, record in (("serve", findings.serve), ("bench", findings.bench), ("eval", findings.eval)):
        if record is not None and record.server is not None:
            told.setdefault(record.server, []).append(stage)
    return {"servers": {", ".join(stages): server_rows(facts) for facts, stages in told.items()}, "names": _NAMES}


def server_rows(facts: ServerFacts) -> dict[str, str]:
    """Field -> what the server said; "not told" where it said nothing that could be read."""

    def said(name: str, value: str | int | bool | None) -> str:
        if value is None:
            return "not told"
        if isinstance(value, bool):
            return "on" if value else "off"
        if name == "kv_cache_dtype" and value == "auto":
            return "auto: as the weights"
        return value if isinstance(value, str) else count(value)

    return {name: said(name, getattr(facts, name)) for name in _NAMES}


def make_bench(findings: RunRecords) -> dict[str, Any]:
    """Charts, lengths, and the cells by length and load."""
    bench = findings.bench
    if bench is None:
        return {}
    cells = sorted(bench.cells, key=lambda cell: (cell.input_tokens, cell.output_tokens, *load_of(cell)))
    return {
        "charts": load_charts(bench),
        "lengths": lengths(bench, cells),
        "cells": cells,
    }


def lengths(bench: BenchRecord, cells: Sequence[BenchCell]) -> list[tuple[BenchCell, BenchCell, str | None]]:
    """For each length that completed a request its lightest and fastest cell, and with an SLO where it saturates."""
    found = []
    for key in dict.fromkeys((cell.input_tokens, cell.output_tokens) for cell in cells):
        row = [cell for cell in cells if (cell.input_tokens, cell.output_tokens) == key and cell.completed]
        saturates = (each for each in bench.saturations if (each.input_tokens, each.output_tokens) == key)
        if fastest := fastest_cell(row):
            found.append((row[0], fastest, next(map(saturation_rate, saturates), None)))
    return found
