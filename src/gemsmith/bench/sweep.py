"""A sweep: every cell of a grid, and of the search for the rate at which the server saturates.

What is measured is kept until the sweep is whole, so that a second start continues with the others.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.text import Text

from gemsmith.bench.cell import LoadSpec, describe_load, make_ask, notices_of, plan_cells, read_cell
from gemsmith.bench.driver import Client, client_arguments, failure_lines, measure, running_client
from gemsmith.bench.metrics import fetch_metrics, open_metrics, read_prefix_caching, sampling, summarize
from gemsmith.bench.requests import ImageRows
from gemsmith.errors import EngineError
from gemsmith.recipe.serving import Bench, Load
from gemsmith.runs.bench_records import BenchCell, Saturation, Slo
from gemsmith.serve.client.endpoint import Endpoint, key_headers
from gemsmith.serve.settings import VllmEnvironment
from gemsmith.system.console import open_console
from gemsmith.system.files import sha256_json, write_text
from gemsmith.system.format import counts, rough
from gemsmith.system.version import __version__

CELLS = "cells"  # the folder of what is kept: a sweep that is whole needs it no more, and --force would find it
ENOUGH = 0.95  # the goodput under which a rate is too much
NEAR = 1.1  # the search ends where the two rates around saturation are no further apart than this
HIGHEST_RATE = 1024.0  # requests a second; one client does not make more


def digest_cell(ask: LoadSpec, slo: Slo | None, facts: Mapping[str, str], client: str) -> str:
    """SHA-256 of all that a cell's numbers depend on: server, load, number of requests, seed, SLO, client."""
    asked = asdict(ask)
    del asked["number"]
    inputs = {"gemsmith": __version__, "client": client, "server": dict(facts), **asked}
    return sha256_json(inputs | {"slo": None if slo is None else slo.model_dump()})


def find_cell(file: Path) -> BenchCell | None:
    """The cell that is kept there; None also where the file is damaged: it is then measured again."""
    try:
        return BenchCell.model_validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def expected_s(ask: LoadSpec, done: Sequence[BenchCell]) -> float:
    """Seconds until a cell's requests have come, and are answered at the highest speed seen."""
    arrivals_s = ask.requests / ask.load.request_rate
    same = [cell for cell in done if cell.input_tokens == ask.load.input_tokens]
    fastest = max((cell.output_tokens_per_s for cell in same or done), default=0.0)
    answers_s = ask.requests * ask.load.output_tokens / fastest if fastest else 0.0
    return max(arrivals_s, answers_s)


def next_rate(tried: Mapping[float, float]) -> float | None:
    """The rate to measure next, from rate -> goodput so far; None where nothing is left to find.

    Bisected by ratio between the highest rate that held and the lowest that did not; doubled where all have held. Where
    the lowest did not hold, nothing is searched: the SLO is beyond the server.

    >>> next_rate({1.0: 1.0, 4.0: 0.5}), next_rate({1.0: 1.0, 4.0: 0.99}), next_rate({1.0: 0.2})
    (2.0, 8.0, None)
    """
    held, exceeded = bracket(tried)
    if held is None:
        return None
    if exceeded is None:
        return 2 * held if 2 * held <= HIGHEST_RATE else None
    if exceeded / held <= NEAR:
        return None
    return float(f"{math.sqrt(held * exceeded):.3g}")


def bracket(tried: Mapping[float, float]) -> tuple[float | None, float | None]:
    """The highest rate that held below the lowest that did not, and that one."""
    exceeded = min((rate for rate, goodput in tried.items() if goodput < ENOUGH), default=None)
    held = max((rate for rate in tried if exceeded is None or rate < exceeded), default=None)
    return held, exceeded


def read_saturation(tried: Mapping[float, float], *, input_tokens: int, output_tokens: int) -> Saturation:
    held, exceeded = bracket(tried)
    return Saturation(input_tokens=input_tokens, output_tokens=output_tokens, held_at=held, exceeded_at=exceeded)


def describe_saturation(found: Saturation) -> str:
    """One sentence without its full stop."""
    lengths = f"with {found.input_tokens} tokens in and {found.output_tokens} out"
    if found.held_at is None:
        return f"the SLO cannot be met {lengths}: at {found.exceeded_at:g} requests/s, the lowest rate, it is not"
    if found.exceeded_at is None:
        return f"the server does not saturate {lengths} at {found.held_at:g} requests/s, the highest rate tried"
    return f"the server saturates {lengths} between {found.held_at:g} and {found.exceeded_at:g} requests/s"


@dataclass(kw_only=True)
class _Sweep:
    endpoint: Endpoint
    engine: VllmEnvironment
    bench: Bench
    slo: Slo | None
    seed: int
    folder: Path
    rows: ImageRows | None
    client: Callable[[], Client]  # started when it is first asked for
    cells: list[BenchCell] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # why cells have no numbers of the server itself
    reused: int = 0


def run_sweep(
    endpoint: Endpoint, engine: VllmEnvironment, bench: Bench, *, seed: int, folder: Path, rows: ImageRows | None = None
) -> dict[str, Any]:
    """Measures every cell of the grid that `folder` does not keep from an earlier start, and searches saturation.

    Gives fields of a record. `engine` is where vLLM's bench client is; `rows` are what requests are made of, in place
    of random text. Raises EngineError where server or client end, a cell stalls, or no request at all is answered; the
    cells before stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file():  # of an earlier start; what it has measured is in a folder
            file.unlink()
    if rows is not None:
        bench = bench.model_copy(update={"input_tokens": (round(sum(rows.lengths) / len(rows.lengths)),)})
    asks, slo = plan_cells(bench, seed), Slo(ttft_ms=bench.slo_ttft_ms, tpot_ms=bench.slo_tpot_ms)
    clients = running_client(engine.python, endpoint, folder, rows=rows)
    with contextlib.ExitStack() as stack:
        sweep = _Sweep(
            endpoint=endpoint,
            engine=engine,
            bench=bench,
            slo=None if slo == Slo() else slo,
            seed=seed,
            folder=folder,
            rows=rows,
            client=functools.cache(lambda: stack.enter_context(clients)),
        )
        saturations = list(_run_grid(sweep, asks))
    with open_metrics(endpoint.url, key_headers()) as client:
        text = fetch_metrics(client)
    told = read_prefix_caching(text) if isinstance(text, str) else None
    caching = endpoint.prefix_caching if told is None else told
    return {
        "cells": tuple(sweep.cells),
        "saturations": tuple(saturations),
        "prefix_caching": caching,
        "warnings": (
            *notices_of(sweep.cells),
            *_notices(sweep, caching),
            *(f"{said[0].upper()}{said[1:]}." for said in map(describe_saturation, saturations)),
        ),
        "command": ("vllm", "bench", "serve", *client_arguments(endpoint, asks[0], folder, images=rows is not None)),
        "slo": sweep.slo,
        "grid": bench.grid,
        "endpoint": {"url": endpoint.url, **endpoint.facts},
    }


def _run_grid(sweep: _Sweep, asks: Sequence[LoadSpec]) -> Iterator[Saturation]:
    """Measures the grid's cells, and after those of each length what else its saturation takes."""
    left = list(asks)
    for (tokens, answer), group in itertools.groupby(asks, lambda ask: (ask.load.input_tokens, ask.load.output_tokens)):
        lengths, tried = {"input_tokens": tokens, "output_tokens": answer}, dict[float, float]()
        for ask in group:
            left.remove(ask)
            cell = _run_cell(sweep, ask, left)
            if sweep.slo is not None and ask.load.is_open:
                tried[ask.load.request_rate] = cell.goodput or 0.0
                if len(tried) == 1 and next_rate(tried) is None:
                    described = describe_saturation(read_saturation(tried, **lengths))
                    open_console().print(Text.assemble("bench: ", (described, "bold red")))
        if not tried:
            continue
        while (rate := next_rate(tried)) is not None:
            number = len(sweep.cells) + 1
            probe = make_ask(sweep.bench, Load(**lengths, request_rate=rate), sweep.seed, number=number, probe=True)
            tried[rate] = _run_cell(sweep, probe, left).goodput or 0.0
        found = read_saturation(tried, **lengths)
        if found.held_at is not None:
            open_console().print(Text.assemble("bench: ", (describe_saturation(found), "bold")))
        yield found


def _run_cell(sweep: _Sweep, ask: LoadSpec, left: Sequence[LoadSpec]) -> BenchCell:
    """The cell, from an earlier start or measured now."""
    facts = {**sweep.endpoint.facts, **({"rows": sweep.rows.sha256} if sweep.rows else {})}
    digest = digest_cell(ask, sweep.slo, facts, f"{sweep.engine.package} {sweep.engine.version}")
    file = sweep.folder / CELLS / f"{digest}.json"
    kept = find_cell(file)
    if kept is None:
        cell = _measure(sweep, ask, left)
        file.parent.mkdir(exist_ok=True)
        write_text(file, cell.model_dump_json(indent=1) + "\n")
    else:
        cell, sweep.reused = kept, sweep.reused + 1
    sweep.cells.append(cell)
    left_s = sum(expected_s(each, sweep.cells) for each in left)
    open_console().print(
        Text.assemble(
            f"bench: {describe_load(ask.load)}: TTFT p50 {cell.ttft_ms.p50:.0f} ms, "
            f"TPOT p50 {cell.tpot_ms.p50:.1f} ms, {cell.output_tokens_per_s:.0f} tokens/s out",
            "" if cell.goodput is None else f", goodput {100 * cell.goodput:.0f} %",
            (f", not answered whole: {counts(cell.failures)}" if cell.failures else "", "red"),
            (", from an earlier start" if kept is not None else "", "dim"),
            (f"; about {rough(left_s)} left" if left else "", "dim"),
        )
    )
    return cell


def _measure(sweep: _Sweep, ask: LoadSpec, left: Sequence[LoadSpec]) -> BenchCell:
    """Raises EngineError, before anything of the cell is kept, where the server is gone or has answered nothing yet."""
    place = f"{len(sweep.cells) + 1}/{len(sweep.cells) + 1 + len(left)}"
    others_s = sum(expected_s(each, sweep.cells) for each in left)
    client = sweep.client()
    with open_console().status("") as status, sampling(sweep.endpoint.url, key_headers()) as samples:

        def show(ended: int) -> None:
            rest_s = others_s + expected_s(ask, sweep.cells) * max(0.0, 1 - ended / ask.requests)
            status.update(
                f"bench {place}: {describe_load(ask.load)}: {ended} of {ask.requests} requests ended, "
                f"about {rough(rest_s)} left"
            )

        show(0)
        result = measure(client, ask, heard=show)
    cell = read_cell(ask, result, sweep.slo)
    if cell.failures or cell.warmup_failures:
        # What a server that has gone left unanswered says nothing of how fast it is.
        try:
            sweep.endpoint.prove()
        except EngineError as error:
            raise EngineError(
                f"bench: {ask}: {error}\nnothing of this cell counts; {len(sweep.cells)} cells before it are kept, and "
                "the same command continues with the others once the server is back"
            ) from None
    if not cell.completed and not any(earlier.completed for earlier in sweep.cells):
        raise EngineError(
            f"bench: {ask}: none of {ask.count.measured} requests was answered whole: "
            f"{counts(cell.failures)}; what the client says of them:\n{failure_lines(client.log)}"
        )
    load = summarize(samples.found)
    if load is None:
        sweep.problems.append(samples.problem or "was not answered in time")
    return cell.model_copy(update={"server": load})


def _notices(sweep: _Sweep, caching: bool | None) -> Iterator[str]:
    if sweep.problems:
        yield (
            f"{len(sweep.problems)} of {len(sweep.cells)} cells have no numbers of the server's own: "
            f"{sweep.endpoint.url}/metrics {sweep.problems[0]}."
        )
    cached = "prompts are random and each is measured once, so little of them can be cached"
    if sweep.rows is not None:
        cached = "what prompts begin with is shared, and rows that come again are known: times may flatter"
    if caching is None:
        yield (f"Whether prefix caching was on is not known; {cached}.")
    elif caching:
        yield f"Prefix caching was on; {cached}."
    if sweep.reused:
        yield f"{sweep.reused} of {len(sweep.cells)} cells were measured by an earlier start that was stopped."
