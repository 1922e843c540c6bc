"""The stage `bench`: a grid of loads against the tuned model, measured by vLLM's own client."""

import hashlib
import json

from gemsmith.bench.endpoint import endpoint_of
from gemsmith.bench.kept import forget_cells
from gemsmith.bench.sweep import CELLS, make_slo, run_sweep
from gemsmith.bench_records import BenchRecord
from gemsmith.provenance import start_clock
from gemsmith.records import ExportRecord
from gemsmith.run import Run, read_record, write_record
from gemsmith.serve.engine import find_engine
from gemsmith.serve.stage import Servers, origin_with_engine


def bench(run: Run, servers: Servers) -> BenchRecord:
    """Runs every cell and records it. Prefix caching is off, and each cell has prompts of its own.

    A start that is stopped leaves the cells that it has measured to the next. Raises EngineError where server or client
    fail, or no request is answered.
    """
    clock, bench_ = start_clock(), run.recipe.bench
    server = servers.tuned()
    endpoint = endpoint_of(server, weights_sha256=_weights_sha256(read_record(run, ExportRecord)))
    folder = run.logs / "bench"
    measured = run_sweep(endpoint, find_engine(run.recipe.serve.python), bench_, seed=run.recipe.seed, folder=folder)
    record = BenchRecord(
        origin=origin_with_engine(run, "bench", clock, server),
        cells=measured.cells,
        notices=(*servers.notices, *measured.notices, *picture_notices(takes_pictures=servers.takes_pictures)),
        prefix_caching=measured.prefix_caching,
        command=measured.command,
        grid=bench_.grid,
        endpoint={"url": server.url, **endpoint.facts},
        server=server.facts,
        slo=make_slo(bench_),
        saturations=measured.saturations,
    )
    write_record(run, record)
    forget_cells(folder / CELLS)
    return record


def picture_notices(*, takes_pictures: bool) -> tuple[str, ...]:
    """What the times of a model that is served with pictures are not of."""
    if not takes_pictures:
        return ()
    return ("The prompts of bench are text alone: what a picture adds to the time of a request is not in these times.",)


def _weights_sha256(export: ExportRecord) -> str:
    """One digest of all files that may be served."""
    files = [(file.name, file.sha256) for file in (*export.merged, *export.adapter)]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()
