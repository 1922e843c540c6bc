"""The stage `bench`: input lengths x request rates against the tuned model, measured by vLLM's own client."""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from gemsmith.bench.cells import Ask, notices_of, plan_cells, read_cell
from gemsmith.bench.prompts import make_prompts
from gemsmith.errors import EngineError
from gemsmith.files import write_text
from gemsmith.provenance import start_clock
from gemsmith.records import BenchCell, BenchRecord
from gemsmith.run import Run, write_record
from gemsmith.serve.engine import KEY_VARIABLE, clean_environment
from gemsmith.serve.process import guarded, last_lines, refuse_full_disk
from gemsmith.serve.server import Server
from gemsmith.serve.stage import Servers, origin_with_engine
from gemsmith.terminal import open_console

CLIENT = Path(__file__).with_name("client.py")
METRICS = ("ttft", "tpot", "itl")
WARMUP_REQUESTS = 2
READY_TIMEOUT_S = 60
POLL_S = 0.2
# The client touches this file when tokens have come.
HEARD = "heard"
# The client has nothing to save when it is told to end.
GRACE_S = 1.0


def bench(run: Run, servers: Servers) -> BenchRecord:
    """Runs every cell and records it. Prefix caching is off, and each cell has prompts of its own.

    Raises EngineError where the client fails, or a cell stalls or has no completed request.
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
    measured = _run_client(
        server, [str(server.python), str(CLIENT), str(folder / "cells.json"), str(folder / HEARD)], asks, folder
    )
    record = BenchRecord(
        origin=origin_with_engine(run, "bench", clock, server),
        cells=tuple(measured),
        notices=(*servers.notices, *notices_of(measured)),
        prefix_caching="--enable-prefix-caching" in server.command,
        command=("vllm", "bench", "serve", *cells[0]),
    )
    write_record(run, record)
    return record


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
        "--save-detailed",
        "--disable-tqdm",
    ]


def _prompt_rows(checkpoint: Path, ask: Ask) -> str:
    prompts = make_prompts(checkpoint, tokens=ask.input_tokens, prompts=ask.prompts, seed=ask.seed)
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


def _run_client(server: Server, command: Sequence[str], asks: Sequence[Ask], folder: Path) -> list[BenchCell]:
    """Runs the client and reads each cell as it is saved."""
    log, console = folder / "client.log", open_console()
    cells: list[BenchCell] = []
    with (
        guarded(command, environment=_client_environment(), log=log, grace_s=GRACE_S) as process,
        console.status("") as status,
    ):
        for ask in asks:
            status.update(
                f"bench {ask.number}/{len(asks)}: {ask.input_tokens} tokens in, {ask.request_rate:g} requests/s"
            )
            result = _wait_for(ask, folder, process, server)
            try:
                cells.append(read_cell(ask, result))
            except EngineError as error:
                raise EngineError(
                    f"{error}; the end of the client's output:\n{_failures(log) or last_lines(log)}"
                ) from None
            console.print(_describe(cells[-1]))
    return cells


def _wait_for(ask: Ask, folder: Path, process: subprocess.Popen[bytes], server: Server) -> Any:
    """The cell's result once it is there whole.

    Raises EngineError where the client or the server ends, or no token comes any more.
    """
    log, heard, heard_s = folder / "client.log", None, time.monotonic()
    while True:
        ended = process.poll() is not None  # asked first: what a client that has ended wrote is all there
        try:
            return json.loads((folder / ask.result_file).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # not there yet, or half of it
            server.check()
            if ended:
                refuse_full_disk(log)
                raise EngineError(
                    f"bench: {ask}: vLLM's bench client failed (exit code {process.returncode}); the end of its "
                    f"output:\n{last_lines(log)}"
                ) from None
        if (touched := _touched(folder / HEARD)) != heard:
            heard, heard_s = touched, time.monotonic()
        if time.monotonic() - heard_s > ask.quiet_s:
            raise EngineError(
                f"bench: {ask}: no token has come for {ask.quiet_s:.0f} s: a stream has stalled, or the server hangs; "
                f"see {server.log} "
                f"and {log}; the cells before it are in {folder}"
            )
        time.sleep(POLL_S)


def _touched(file: Path) -> int | None:
    """When a file was last touched, by its own clock; None where it is not there."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _failures(log: Path) -> str:
    """The client's own lines on why requests failed."""
    return "\n".join(
        line[:300]
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("Error ")
    )


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


def _describe(cell: BenchCell) -> Text:
    return Text.assemble(
        f"bench: {cell.input_tokens} in, {cell.request_rate:g} requests/s: TTFT p50 {cell.ttft_ms.p50:.0f} ms, "
        f"TPOT p50 {cell.tpot_ms.p50:.1f} ms, {cell.output_tokens_per_s:.0f} tokens/s out",
        (f", {cell.failed} failed" if cell.failed else "", "red"),
        (f", {cell.cut} ended early" if cell.cut else "", "red"),
    )
