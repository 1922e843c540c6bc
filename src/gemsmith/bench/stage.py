"""The stage `bench`: input lengths x request rates against the tuned model, measured by vLLM's own client."""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gemsmith.bench.prompts import make_prompts
from gemsmith.errors import EngineError, RecipeError
from gemsmith.recipe import Recipe
from gemsmith.records import BenchCell, BenchRecord, Percentiles
from gemsmith.run import Run, start_clock, write_record, write_text
from gemsmith.serve.engine import KEY_VARIABLE, clean_environment
from gemsmith.serve.process import guarded, last_lines
from gemsmith.serve.server import Server
from gemsmith.serve.stage import Servers, origin_with_engine

CLIENT = Path(__file__).with_name("client.py")
METRICS = ("ttft", "tpot", "itl")
WARMUP_REQUESTS = 2
READY_TIMEOUT_S = 60
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One cell of the sweep, as asked for."""

    number: int
    input_tokens: int
    output_tokens: int
    request_rate: float
    prompts: int
    seed: int

    @property
    def result_file(self) -> str:
        return f"{self._stem}.json"

    @property
    def prompts_file(self) -> str:
        return f"{self._stem}-prompts.jsonl"

    @property
    def _stem(self) -> str:
        return f"{self.number:02d}-{self.input_tokens}in-{self.request_rate:g}rps"


def bench(run: Run, servers: Servers) -> BenchRecord:
    """Runs every cell and records it. Prefix caching is off, and each cell has prompts of its own.

    Raises RecipeError for a length that the server would refuse, EngineError where the client fails or a cell has no completed request.
    """
    clock = start_clock()
    asks = plan_cells(run.recipe)
    server = servers.tuned()
    folder = run.logs / "bench"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for ask in asks:
        write_text(folder / ask.prompts_file, _prompt_rows(server.folder, ask))
    cells = [client_arguments(server, ask, folder) for ask in asks]
    write_text(folder / "cells.json", json.dumps(cells, indent=1))
    measured = _run_client(server, [str(server.python), str(CLIENT), str(folder / "cells.json")], asks, folder)
    record = BenchRecord(
        origin=origin_with_engine(run, "bench", clock, server),
        cells=tuple(measured),
        prefix_caching="--enable-prefix-caching" in server.command,
        command=("vllm", "bench", "serve", *cells[0]),
    )
    write_record(run, record)
    return record


def plan_cells(recipe: Recipe) -> list[Ask]:
    """The cells in order, each with a seed of its own. Raises RecipeError where one does not fit serve.max_model_len."""
    bench_, limit = recipe.bench, recipe.serve.max_model_len
    longest = max(bench_.input_tokens) + bench_.output_tokens
    if limit is not None and longest > limit:
        raise RecipeError(
            f"bench.input_tokens: {max(bench_.input_tokens)} and bench.output_tokens: {bench_.output_tokens} make {longest} tokens, "
            f"more than serve.max_model_len: {limit}; lower one or raise the other"
        )
    pairs = itertools.product(bench_.input_tokens, bench_.request_rates)
    return [
        Ask(
            number=number,
            input_tokens=input_tokens,
            output_tokens=bench_.output_tokens,
            request_rate=rate,
            prompts=bench_.prompts,
            seed=recipe.seed * 1000 + number,
        )
        for number, (input_tokens, rate) in enumerate(pairs, start=1)
    ]


def client_arguments(server: Server, ask: Ask, folder: Path) -> list[str]:
    """The arguments of `vllm bench serve` for one cell."""
    asked = {
        "backend": "openai",
        "base-url": server.url,
        "model": server.model,
        "served-model-name": server.model,
        "tokenizer": server.folder,
        "dataset-name": "custom",
        "dataset-path": folder / ask.prompts_file,
        "custom-output-len": ask.output_tokens,
        "num-prompts": ask.prompts,
        "request-rate": ask.request_rate,
        "seed": ask.seed,
        "temperature": 0,
        "num-warmups": WARMUP_REQUESTS,
        "ready-check-timeout-sec": READY_TIMEOUT_S,
        "percentile-metrics": ",".join(METRICS),
        "metric-percentiles": "50,90,99",
        "result-dir": folder,
        "result-filename": ask.result_file,
    }
    pairs = [[f"--{key}", str(value)] for key, value in asked.items()]
    return [
        *itertools.chain.from_iterable(pairs),
        "--skip-chat-template",
        "--disable-shuffle",
        "--ignore-eos",
        "--save-result",
        "--disable-tqdm",
    ]


def read_cell(ask: Ask, result: Mapping[str, Any]) -> BenchCell:
    """The cell that a result of `vllm bench serve` tells; token counts are those the server reported."""
    completed = result["completed"]
    return BenchCell(
        input_tokens=ask.input_tokens,
        output_tokens=ask.output_tokens,
        request_rate=ask.request_rate,
        completed=completed,
        failed=result["failed"],
        real_input_tokens=round(result["total_input_tokens"] / completed, 2),
        real_output_tokens=round(result["total_output_tokens"] / completed, 2),
        duration_s=round(result["duration"], 3),
        **{f"{metric}_ms": _percentiles(metric, result) for metric in METRICS},
        output_tokens_per_s=round(result["output_throughput"], 2),
        requests_per_s=round(result["request_throughput"], 3),
    )


def _prompt_rows(checkpoint: Path, ask: Ask) -> str:
    prompts = make_prompts(checkpoint, tokens=ask.input_tokens, prompts=ask.prompts, seed=ask.seed)
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


def _percentiles(metric: str, result: Mapping[str, Any]) -> Percentiles:
    return Percentiles(**{name: round(result[f"{name}_{metric}_ms"], 3) for name in ("mean", "p50", "p90", "p99")})


def _run_client(server: Server, command: Sequence[str], asks: Sequence[Ask], folder: Path) -> list[BenchCell]:
    """Runs the client and reads each cell as it is saved."""
    log, console = folder / "client.log", Console(stderr=True, highlight=False, soft_wrap=True)
    cells: list[BenchCell] = []
    with guarded(command, environment=_client_environment(), log=log) as process, console.status("") as status:
        for ask in asks:
            status.update(f"bench {ask.number}/{len(asks)}: {ask.input_tokens} tokens in, {ask.request_rate:g} requests/s")
            result = _wait_for(folder / ask.result_file, process, server, log)
            if not result["completed"]:
                raise EngineError(
                    f"bench: none of {ask.prompts} requests of {ask.input_tokens} tokens at {ask.request_rate:g} requests/s was completed; "
                    f"the end of the client's output:\n{_failures(log) or last_lines(log)}"
                )
            cells.append(read_cell(ask, result))
            console.print(_describe(cells[-1]))
    return cells


def _wait_for(file: Path, process: subprocess.Popen[bytes], server: Server, log: Path) -> Mapping[str, Any]:
    """The result once it is there whole."""
    while True:
        ended = process.poll() is not None  # asked first: what a client that has ended wrote is all there
        try:
            result: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return result
        except (FileNotFoundError, json.JSONDecodeError):  # not there yet, or half of it
            server.check()
            if ended:
                raise EngineError(
                    f"bench: vLLM's bench client failed (exit code {process.returncode}); the end of its output:\n{last_lines(log)}"
                ) from None
        time.sleep(POLL_S)


def _failures(log: Path) -> str:
    """The client's own lines on why requests failed."""
    return "\n".join(line[:300] for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.startswith("Error "))


def _client_environment() -> dict[str, str]:
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
        "NO_PROXY": "*",
        "no_proxy": "*",
    }
    key = os.environ.get(KEY_VARIABLE)
    return clean_environment() | quiet | ({"OPENAI_API_KEY": key} if key else {})


def _describe(cell: BenchCell) -> str:
    failed = f", [red]{cell.failed} failed[/]" if cell.failed else ""
    return (
        f"bench: {cell.input_tokens} in, {cell.request_rate:g} requests/s: TTFT p50 {cell.ttft_ms.p50:.0f} ms, "
        f"TPOT p50 {cell.tpot_ms.p50:.1f} ms, {cell.output_tokens_per_s:.0f} tokens/s out{failed}"
    )
