"""What vLLM 0.32's bench client saved of 12 requests, each of 16 tokens in and out, at 20 a second, to a stand-in for
its server."""

import json
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def result() -> dict[str, Any]:
    return json.loads((GOLDEN / "vllm_bench_serve_0.32.json").read_text())


@pytest.fixture
def cut_result() -> dict[str, Any]:
    """The server ended three of the streams after three tokens."""
    return json.loads((GOLDEN / "vllm_bench_serve_0.32_cut.json").read_text())
