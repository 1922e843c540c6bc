"""What the server was started with, and what it said of itself."""

from typing import Any

from gemsmith.records import ServerFacts
from gemsmith.report import numbers
from gemsmith.report.findings import Findings
from gemsmith.run import Run

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


def make(_run: Run, findings: Findings) -> dict[str, Any]:
    """`servers`: which stages' server -> name -> value in words; stages whose servers said the same share one."""
    told: dict[ServerFacts, list[str]] = {}
    for stage, record in (("serve", findings.serve), ("bench", findings.bench), ("eval", findings.eval)):
        if record is not None and record.server is not None:
            told.setdefault(record.server, []).append(stage)
    return {"servers": {", ".join(stages): server_rows(facts) for facts, stages in told.items()}, "names": _NAMES}


def server_rows(facts: ServerFacts) -> dict[str, str]:
    """Field -> what the server said; "not told" where it said nothing that could be read."""
    return {name: _say(name, getattr(facts, name)) for name in _NAMES}


def _say(name: str, value: str | int | bool | None) -> str:
    if value is None:
        return "not told"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "kv_cache_dtype" and value == "auto":
        return "auto: as the weights"
    return value if isinstance(value, str) else numbers.count(value)
