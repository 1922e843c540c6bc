"""The stage `bench`: a grid of loads against the tuned model, measured by vLLM's own client."""

import hashlib
import json
from collections.abc import Sequence

from gemsmith.bench.endpoint import endpoint_of
from gemsmith.bench.kept import forget_cells
from gemsmith.bench.pictures import most_requests, read_picture_rows
from gemsmith.bench.sweep import CELLS, make_slo, run_sweep
from gemsmith.bench_records import BenchRecord
from gemsmith.provenance import start_clock
from gemsmith.records import ExportRecord
from gemsmith.run import Run, read_record, write_record
from gemsmith.serve.engine import find_engine
from gemsmith.serve.stage import Servers, origin_with_engine
from gemsmith.serve.upstream import PICTURES_EMBEDDED_ANEW


def bench(run: Run, servers: Servers) -> BenchRecord:
    """Runs every cell and records it. Prefix caching is off, and each cell has prompts of its own.

    With bench.pictures these are rows of data.eval; each picture is embedded anew, however often it comes. A start that
    is stopped leaves the cells that it has measured to the next. Raises EngineError where server or client fail, or no
    request is answered.
    """
    clock, bench_ = start_clock(), run.recipe.bench
    rows = read_picture_rows(run.recipe, most=most_requests(run.recipe)) if bench_.pictures else None
    server = servers.tuned()
    endpoint = endpoint_of(server, weights_sha256=_weights_sha256(read_record(run, ExportRecord)))
    folder = run.logs / "bench"
    engine = find_engine(run.recipe.serve.python)
    measured = run_sweep(endpoint, engine, bench_, seed=run.recipe.seed, folder=folder, rows=rows)
    text_alone = servers.takes_pictures and rows is None
    record = BenchRecord(
        origin=origin_with_engine(run, "bench", clock, server.vllm),
        cells=measured.cells,
        notices=(*servers.notices, *measured.notices, *picture_notices(text_alone=text_alone)),
        prefix_caching=measured.prefix_caching,
        command=measured.command,
        grid=bench_.grid,
        endpoint={"url": server.url, **endpoint.facts},
        server=server.facts,
        slo=make_slo(bench_),
        saturations=measured.saturations,
        pictures=None if rows is None else rows.describe(encoder_cache=keeps_pictures(server.command)),
    )
    write_record(run, record)
    forget_cells(folder / CELLS)
    return record


def picture_notices(*, text_alone: bool) -> tuple[str, ...]:
    """What the times of a model that is served with pictures are not of."""
    if not text_alone:
        return ()
    return (
        "The prompts of bench are text alone: what a picture adds to the time of a request is not in these times; "
        "bench.pictures: true sends held-out rows with theirs.",
    )


def keeps_pictures(command: Sequence[str]) -> bool:
    """Whether a server with this command may keep what it made of a picture for the next request with it."""
    return not {"--no-enable-prefix-caching", *PICTURES_EMBEDDED_ANEW} <= {*command}


def _weights_sha256(export: ExportRecord) -> str:
    """One digest of all files that may be served."""
    files = [(file.name, file.sha256) for file in (*export.merged, *export.adapter)]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()
