"""Writes what became of 1,000 requests that a server on a CPU gets at once, to benchmarks/records/load_stress.json.

    python benchmarks/load_stress.py [requests, default 1000]

Needs the serving environment, as gemsmith serve does. Ends with an error if a request is lost or counted twice: by our
count, and by that of the server, which its /metrics tell.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import httpx

from gemsmith.bench.cell import asked_of
from gemsmith.bench.driver import WARMUP_REQUESTS
from gemsmith.bench.sweep import run_sweep
from gemsmith.checkpoints.folder import read_config
from gemsmith.recipe.serving import Bench
from gemsmith.runs.run import host_info, start_clock
from gemsmith.serve.client.endpoint import endpoint_of
from gemsmith.serve.server import running_server
from gemsmith.serve.settings import ServeSettings, find_vllm
from gemsmith.system.version import __version__
from short import RECORDS, SHORT

ROOT = Path(__file__).parents[1]
RECORD = RECORDS / "load_stress.json"
MODEL = ROOT / "recipes" / "demo_base"
TOKENS, ANSWER = 16, 8


def count_answered(url: str) -> int:
    """The requests that a server has ended, by its own count."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    return round(sum(float(value) for value in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.M)))


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 100 if SHORT else 1000
    clock, engine = start_clock(), find_vllm()
    bench = Bench(input_tokens=(TOKENS,), output_tokens=ANSWER, request_rates=("burst",), prompts=requests)
    settings = ServeSettings(max_model_len=TOKENS + ANSWER, dtype="float32")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_server(MODEL, name="demo", settings=settings, log=folder / "vllm.log") as server:
            before = count_answered(server.url)
            endpoint = endpoint_of(server, weights_sha256="")
            measured = run_sweep(endpoint, engine, bench, seed=0, folder=folder / "bench")
            answered = count_answered(server.url) - before
    (cell,) = measured["cells"]
    record = {
        "schema_version": 1,
        "when": clock.started,
        "duration_s": round(clock.elapsed_s(), 1),
        "gemsmith": __version__,
        "vllm": f"{engine.package} {engine.version}",
        "machine": host_info().model_dump(),
        "model": f"recipes/demo_base, {read_config(MODEL)['architectures'][0]}",
        "requests": requests,
        "accounted_for": asked_of(cell),
        "answered_by_the_servers_count": answered - WARMUP_REQUESTS,
        "warnings": measured["warnings"],
        "cell": json.loads(cell.model_dump_json()),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: record[key] for key in ("requests", "accounted_for", "answered_by_the_servers_count")}))
    if not requests == asked_of(cell) == cell.completed + sum(cell.failures.values()):
        sys.exit(f"error: {requests} requests were made and {asked_of(cell)} are accounted for")
    if cell.completed != answered - WARMUP_REQUESTS:
        sys.exit(f"error: {cell.completed} answers came, the server counts {answered - WARMUP_REQUESTS}")


if __name__ == "__main__":
    main()
