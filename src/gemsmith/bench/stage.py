"""The stage `bench`: a grid of loads against the tuned model, measured by vLLM's own client.

Load tests of a server that somebody else has started: `gemsmith bench --url URL`.
"""

import contextlib
import hashlib
import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gemsmith.bench.requests import most_requests, read_image_rows
from gemsmith.bench.sweep import CELLS, forget_cells, make_slo, run_sweep
from gemsmith.errors import InputError, RecipeError
from gemsmith.recipe.load import build_recipe, load_recipe
from gemsmith.recipe.schema import Bench, Recipe
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.provenance import Clock, host_info, start_clock
from gemsmith.runs.records import ExportRecord, Origin
from gemsmith.runs.run import Run, read_record, write_record
from gemsmith.serve.client.endpoint import Endpoint, endpoint_of, find_endpoint
from gemsmith.serve.settings import VllmEnvironment, find_vllm
from gemsmith.serve.stage import Servers, origin_with_engine
from gemsmith.serve.vllm_issues import IMAGES_EMBEDDED_ANEW
from gemsmith.system.files import write_text
from gemsmith.system.version import __version__


def bench(run: Run, servers: Servers) -> BenchRecord:
    """Runs every cell and records it. Prefix caching is off, and each cell has prompts of its own.

    With bench.images these are rows of data.eval; each image is embedded anew, however often it comes. A start that
    is stopped leaves the cells that it has measured to the next. Raises EngineError where server or client fail, or no
    request is answered.
    """
    clock, bench_ = start_clock(), run.recipe.bench
    rows = read_image_rows(run.recipe, most=most_requests(run.recipe)) if bench_.images else None
    server = servers.tuned()
    endpoint = endpoint_of(server, weights_sha256=_weights_sha256(read_record(run, ExportRecord)))
    folder = run.logs / "bench"
    engine = find_vllm(run.recipe.serve.python)
    measured = run_sweep(endpoint, engine, bench_, seed=run.recipe.seed, folder=folder, rows=rows)
    text_alone = servers.takes_images and rows is None
    record = BenchRecord(
        origin=origin_with_engine(run, "bench", clock, server.vllm),
        cells=measured.cells,
        warnings=(*servers.warnings, *measured.warnings, *image_notices(text_alone=text_alone)),
        prefix_caching=measured.prefix_caching,
        command=measured.command,
        grid=bench_.grid,
        endpoint={"url": server.url, **endpoint.facts},
        server=server.facts,
        slo=make_slo(bench_),
        saturations=measured.saturations,
        images=None if rows is None else rows.describe(encoder_cache=keeps_images(server.command)),
    )
    write_record(run, record)
    forget_cells(folder / CELLS)
    return record


def image_notices(*, text_alone: bool) -> tuple[str, ...]:
    """What the times of a model that is served with images are not of."""
    if not text_alone:
        return ()
    return (
        "The prompts of bench are text alone: what a image adds to the time of a request is not in these times; "
        "bench.images: true sends held-out rows with theirs.",
    )


def keeps_images(command: Sequence[str]) -> bool:
    """Whether a server with this command may keep what it made of a image for the next request with it."""
    return not {"--no-enable-prefix-caching", *IMAGES_EMBEDDED_ANEW} <= {*command}


def _weights_sha256(export: ExportRecord) -> str:
    """One digest of all files that may be served."""
    files = [(file.name, file.sha256) for file in (*export.merged, *export.adapter)]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


_KEYS = ("bench.", "seed=")
_MAY_BE_KEPT = (
    "Whether the server keeps what it made of a image for the next request with it is not known; images that come "
    "again in another cell may have cost it less."
)


def bench_url(
    source: Path | None,
    overrides: Sequence[str],
    *,
    url: str,
    model: str | None = None,
    tokenizer: Path | None = None,
    out: Path | None = None,
) -> BenchRecord:
    """Runs every cell against any OpenAI-compatible server; the record goes to `out`, where that is given.

    `source`: the recipe or run directory whose section bench says what is measured, else its defaults do. What is
    measured is kept beside `out` until the record is whole.
    """
    clock = start_clock()
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise InputError(f"--out {out}: must be a file in a folder that is there")
    recipe = _read_settings(source, overrides)
    bench_, seed = recipe.bench, recipe.seed
    engine = find_vllm(recipe.serve.python)
    endpoint = find_endpoint(url, model, tokenizer)
    rows = read_image_rows(recipe, most=most_requests(recipe)) if bench_.images else None
    _refuse_too_long(bench_ if rows is None else bench_.model_copy(update={"input_tokens": rows.lengths}), endpoint)
    with _working_folder(out) as folder:
        measured = run_sweep(endpoint, engine, bench_, seed=seed, folder=folder, rows=rows)
        record = BenchRecord(
            origin=_make_origin(clock, engine, seed),
            warnings=(*measured.warnings, *([_MAY_BE_KEPT] if rows is not None else [])),
            cells=measured.cells,
            prefix_caching=measured.prefix_caching,
            command=measured.command,
            grid=bench_.grid,
            endpoint=dict(endpoint.facts),
            slo=make_slo(bench_),
            saturations=measured.saturations,
            images=None if rows is None else rows.describe(encoder_cache=None),
        )
        if out is not None:
            write_text(out, record.model_dump_json(indent=1) + "\n")
        forget_cells(folder / CELLS)
    return record


def _read_settings(source: Path | None, overrides: Sequence[str]) -> Recipe:
    """A recipe whose section bench, seed and Python that has vLLM's bench client are read, and rows with images."""
    if source is None:
        if other := [each for each in overrides if not each.strip().startswith((*_KEYS, "serve.python="))]:
            raise RecipeError(
                f"--set {other[0]}: has no effect on a server that runs already; keys of bench, seed and serve.python "
                "have"
            )
        # No key but those of bench is read; these two must be given in every recipe.
        return build_recipe({"checkpoint": "none", "data": {"train": "none"}}, overrides, source="--set")
    return load_recipe(source / "recipe.yaml" if source.is_dir() else source, overrides)


def _make_origin(clock: Clock, engine: VllmEnvironment, seed: int) -> Origin:
    """Where a record comes from that no run has."""
    return Origin(
        started=clock.started,
        duration_s=round(clock.elapsed_s(), 3),
        gemsmith=__version__,
        versions={"python": platform.python_version(), engine.package: engine.version},
        machine=host_info(),
        seed=seed,
        inputs_sha256={},
    )


def _refuse_too_long(bench_: Bench, endpoint: Endpoint) -> None:
    longest = max(load.input_tokens + load.output_tokens for load in bench_.plan.loads)
    limit = endpoint.facts.get("max_model_len", "")
    if limit.isdecimal() and longest > int(limit):
        raise InputError(
            f"bench.{'input_tokens' if bench_.grid == 'own' else 'grid'}: a request sends and asks for {longest} "
            f"tokens, more than the {limit} (max_model_len) of {endpoint.model} at {endpoint.url}; name another "
            "--grid, or set bench.input_tokens and bench.output_tokens"
        )


@contextlib.contextmanager
def _working_folder(out: Path | None) -> Iterator[Path]:
    """Beside the record, so that a stopped sweep can go on; without one, for this time only."""
    if out is not None:
        yield out.with_name(f"{out.name}.bench")
        return
    with tempfile.TemporaryDirectory(prefix="gemsmith-bench-") as folder:
        yield Path(folder)
