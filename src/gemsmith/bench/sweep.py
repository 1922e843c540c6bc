"""A sweep: every cell of a grid, and of the search for saturation; what is measured is kept on the way."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gemsmith.bench.cells import Ask, describe_failures, describe_load, make_ask, notices_of, plan_cells, read_cell
from gemsmith.bench.client_process import Client, client_arguments, failure_lines, measure, running_client
from gemsmith.bench.endpoint import Endpoint, key_headers
from gemsmith.bench.kept import digest_cell, find_cell, keep_cell
from gemsmith.bench.pictures import PictureRows
from gemsmith.bench.progress import expected_s, say_left
from gemsmith.bench.saturation import describe_saturation, next_rate, read_saturation
from gemsmith.bench.server_load import fetch_metrics, open_metrics, read_prefix_caching, sampling, summarise
from gemsmith.bench_records import BenchCell, Saturation, Slo
from gemsmith.errors import EngineError
from gemsmith.grids import Load
from gemsmith.recipe import Bench
from gemsmith.serve.engine import Engine
from gemsmith.terminal import open_console

CELLS = "cells"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a sweep has found."""

    cells: tuple[BenchCell, ...]
    saturations: tuple[Saturation, ...]
    prefix_caching: bool | None
    notices: tuple[str, ...]
    command: tuple[str, ...]
    """That of the first cell."""


@dataclass
class _Sweep:
    """A sweep that is under way."""

    endpoint: Endpoint
    engine: Engine
    bench: Bench
    seed: int
    folder: Path
    slo: Slo | None
    console: Console
    cells: list[BenchCell] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Why cells have no numbers of the server itself."""
    reused: int = 0
    client: Client | None = None
    rows: PictureRows | None = None


def run_sweep(
    endpoint: Endpoint, engine: Engine, bench_: Bench, *, seed: int, folder: Path, rows: PictureRows | None = None
) -> Measured:
    """Measures every cell of the grid that `folder` does not keep from an earlier start, and searches saturation.

    `engine` is where vLLM's bench client is; `rows` are what requests are made of, in place of random text. Raises
    EngineError where server or client end, a cell stalls, or no request at all is answered; the cells before stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file():  # of an earlier start; what it has measured is in a folder
            file.unlink()
    slo = make_slo(bench_)
    if rows is not None:
        bench_ = bench_.model_copy(update={"input_tokens": (rows.mean_tokens,)})
    asks = plan_cells(bench_, seed)
    with contextlib.ExitStack() as stack:
        sweep = _Sweep(
            endpoint=endpoint,
            engine=engine,
            bench=bench_,
            seed=seed,
            folder=folder,
            slo=slo,
            console=open_console(),
            rows=rows,
        )
        saturations = list(_run_grid(sweep, asks, stack))
    with open_metrics(endpoint.url, key_headers()) as client:
        text = fetch_metrics(client)
    told = read_prefix_caching(text) if isinstance(text, str) else None
    caching = endpoint.prefix_caching if told is None else told
    return Measured(
        cells=tuple(sweep.cells),
        saturations=tuple(saturations),
        prefix_caching=caching,
        notices=(*notices_of(sweep.cells), *_notices(sweep, caching), *map(_as_notice, saturations)),
        command=("vllm", "bench", "serve", *client_arguments(endpoint, asks[0], folder, pictures=rows is not None)),
    )


def make_slo(bench_: Bench) -> Slo | None:
    if bench_.slo_ttft_ms is None and bench_.slo_tpot_ms is None:
        return None
    return Slo(ttft_ms=bench_.slo_ttft_ms, tpot_ms=bench_.slo_tpot_ms)


def _run_grid(sweep: _Sweep, asks: Sequence[Ask], stack: contextlib.ExitStack) -> Iterator[Saturation]:
    """Measures the grid's cells, and after those of each length what else its saturation takes."""
    tried: dict[float, float] = {}
    for place, ask in enumerate(asks):
        cell = _run_cell(sweep, ask, asks[place + 1 :], stack)
        if sweep.slo is None:
            continue
        lengths = {"input_tokens": ask.load.input_tokens, "output_tokens": ask.load.output_tokens}
        if ask.load.is_open:
            tried[ask.load.request_rate] = cell.goodput or 0.0
            if len(tried) == 1 and next_rate(tried) is None:
                _say(sweep, read_saturation(tried, **lengths), "bold red")
        following = asks[place + 1].load if place + 1 < len(asks) else None
        if tried and (following is None or _lengths(following) != _lengths(ask.load)):
            while (rate := next_rate(tried)) is not None:
                tried[rate] = _probe(sweep, ask.load, rate, asks[place + 1 :], stack)
            found = read_saturation(tried, **lengths)
            if found.held_at is not None:
                _say(sweep, found, "bold")
            yield found
            tried = {}


def _probe(sweep: _Sweep, load: Load, rate: float, left: Sequence[Ask], stack: contextlib.ExitStack) -> float:
    """The goodput at one rate more."""
    probed = Load(input_tokens=load.input_tokens, output_tokens=load.output_tokens, request_rate=rate)
    ask = make_ask(sweep.bench, probed, sweep.seed, number=len(sweep.cells) + 1, probe=True)
    return _run_cell(sweep, ask, left, stack).goodput or 0.0


def _run_cell(sweep: _Sweep, ask: Ask, left: Sequence[Ask], stack: contextlib.ExitStack) -> BenchCell:
    """The cell, from an earlier start or measured now."""
    facts = {**sweep.endpoint.facts, **({"rows": sweep.rows.sha256} if sweep.rows else {})}
    digest = digest_cell(ask, sweep.slo, facts, f"{sweep.engine.package} {sweep.engine.version}")
    kept = find_cell(sweep.folder / CELLS, digest)
    if kept is None:
        if sweep.client is None:
            client = running_client(sweep.engine.python, sweep.endpoint, sweep.folder, rows=sweep.rows)
            sweep.client = stack.enter_context(client)
        cell = _measure(sweep, sweep.client, ask, left)
        keep_cell(sweep.folder / CELLS, digest, cell)
    else:
        cell, sweep.reused = kept, sweep.reused + 1
    sweep.cells.append(cell)
    seconds = sum(expected_s(each, sweep.cells) for each in left)
    sweep.console.print(_describe(cell, ask, reused=kept is not None, left=say_left(seconds) if left else ""))
    return cell


def _measure(sweep: _Sweep, client: Client, ask: Ask, left: Sequence[Ask]) -> BenchCell:
    """Raises EngineError, before anything of the cell is kept, where the server is gone or has answered nothing yet."""
    place = f"{len(sweep.cells) + 1}/{len(sweep.cells) + 1 + len(left)}"
    others_s = sum(expected_s(each, sweep.cells) for each in left)
    with sweep.console.status("") as status, sampling(client.endpoint.url, key_headers()) as samples:

        def show(ended: int) -> None:
            rest_s = others_s + expected_s(ask, sweep.cells) * max(0.0, 1 - ended / ask.requests)
            status.update(
                f"bench {place}: {describe_load(ask.load)}: {ended} of {ask.requests} requests ended, "
                f"{say_left(rest_s)}"
            )

        show(0)
        result = measure(client, ask, heard=show)
    cell = read_cell(ask, result, sweep.slo)
    if cell.failures or cell.warmup_failures:
        _refuse_dead(sweep, ask)
    if not cell.completed and not any(earlier.completed for earlier in sweep.cells):
        raise EngineError(
            f"bench: {ask}: none of {ask.count.measured} requests was answered whole: "
            f"{describe_failures(cell.failures)}; what the client says of them:\n{failure_lines(client.log)}"
        )
    load = summarise(samples.found)
    if load is None:
        sweep.problems.append(samples.problem or "was not answered in time")
    return cell.model_copy(update={"server": load})


def _refuse_dead(sweep: _Sweep, ask: Ask) -> None:
    """Raises EngineError where the server has gone: what it left unanswered says nothing of how fast it is."""
    try:
        sweep.endpoint.prove()
    except EngineError as error:
        raise EngineError(
            f"bench: {ask}: {error}\nnothing of this cell counts; {len(sweep.cells)} cells before it are kept, and the "
            "same command goes on with the others once the server is back"
        ) from None


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


def _as_notice(found: Saturation) -> str:
    text = describe_saturation(found)
    return f"{text[0].upper()}{text[1:]}."


def _lengths(load: Load) -> tuple[int, int]:
    return load.input_tokens, load.output_tokens


def _say(sweep: _Sweep, found: Saturation, style: str) -> None:
    sweep.console.print(Text.assemble("bench: ", (describe_saturation(found), style)))


def _describe(cell: BenchCell, ask: Ask, *, reused: bool, left: str) -> Text:
    return Text.assemble(
        f"bench: {describe_load(ask.load)}: TTFT p50 {cell.ttft_ms.p50:.0f} ms, "
        f"TPOT p50 {cell.tpot_ms.p50:.1f} ms, {cell.output_tokens_per_s:.0f} tokens/s out",
        "" if cell.goodput is None else f", goodput {100 * cell.goodput:.0f} %",
        (f", not answered whole: {describe_failures(cell.failures)}" if cell.failures else "", "red"),
        (", from an earlier start" if reused else "", "dim"),
        (f"; {left}" if left else "", "dim"),
    )
