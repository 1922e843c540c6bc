"""A grid of loads, measured by vLLM's own client: against a run's tuned model (the stage `bench`), or any server."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gemsmith.bench.requests import ImageRows, read_image_rows
from gemsmith.bench.sweep import CELLS, run_sweep
from gemsmith.errors import InputError, RecipeError
from gemsmith.recipe.load import build_recipe, load_recipe
from gemsmith.recipe.serving import Bench
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.records import ExportRecord
from gemsmith.runs.run import ExportDir, Run, make_provenance, read_record, start_clock, write_record
from gemsmith.serve.client.endpoint import Endpoint, endpoint_of, find_endpoint
from gemsmith.serve.settings import find_vllm
from gemsmith.serve.stage import Servers
from gemsmith.serve.vllm_issues import IMAGES_EMBEDDED_ANEW
from gemsmith.system.files import sha256_json, write_text

TEXT_ALONE = (
    "The prompts of bench are text alone: what an image adds to the time of a request is not in these times; "
    "bench.images: true sends held-out rows with theirs."
)
_MAY_BE_KEPT = (
    "Whether the server keeps what it made of an image for the next request with it is not known; images that come "
    "again in another cell may have cost it less."
)


def bench(run: Run, servers: Servers) -> BenchRecord:
    """Runs every cell and records it. Prefix caching is off, and each cell has prompts of its own.

    A stopped start leaves its cells to the next. Raises EngineError where server or client fail, or none is answered.
    """
    clock, recipe = start_clock(), run.recipe
    rows = read_image_rows(recipe) if recipe.bench.images else None
    server = servers.tuned()
    export = read_record(run, ExportRecord)
    # All files that may be served.
    weights_sha256 = sha256_json([(file.name, file.sha256) for file in (*export.merged, *export.adapter)])
    endpoint = endpoint_of(server, weights_sha256=weights_sha256)
    folder, engine = run.logs / "bench", find_vllm(recipe.serve.python)
    found = run_sweep(endpoint, engine, recipe.bench, seed=recipe.seed, folder=folder, rows=rows)
    notices = [TEXT_ALONE] if servers.takes_images and rows is None else []
    record = BenchRecord(
        provenance=make_provenance(run, "bench", clock, engine=server.vllm),
        server=server.facts,
        images=None if rows is None else rows.describe(encoder_cache=keeps_images(server.command)),
        **found | {"warnings": (*servers.warnings, *found["warnings"], *notices)},
    )
    write_record(run, record)
    shutil.rmtree(folder / CELLS, ignore_errors=True)
    return record


def keeps_images(command: Sequence[str]) -> bool:
    """Whether a server with this command may keep what it made of an image for the next request with it."""
    return not {"--no-enable-prefix-caching", *IMAGES_EMBEDDED_ANEW} <= {*command}


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

    `source`: the recipe or run directory whose section bench says what is measured, else its defaults do.
    """
    clock = start_clock()
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise InputError(f"--out {out}: must be a file in a folder that is there")
    if source is not None:
        recipe = load_recipe(source / "recipe.yaml" if source.is_dir() else source, overrides)
    elif other := [each for each in overrides if not each.strip().startswith(("bench.", "seed=", "serve.python="))]:
        raise RecipeError(
            f"--set {other[0]}: has no effect on a server that runs already; keys of bench, seed and serve.python have"
        )
    else:  # no key but those is read; these two must be given in every recipe
        recipe = build_recipe({"checkpoint": "none", "data": {"train": "none"}}, overrides, source="--set")
    engine = find_vllm(recipe.serve.python)
    endpoint = find_endpoint(url, model, tokenizer)
    rows = read_image_rows(recipe) if recipe.bench.images else None
    _refuse_too_long(recipe.bench, endpoint, rows)
    with tempfile.TemporaryDirectory(prefix="gemsmith-bench-") as temporary:
        # Beside the record, so that a stopped sweep can resume; without one, for this time only.
        folder = Path(temporary) if out is None else out.with_name(f"{out.name}.bench")
        found = run_sweep(endpoint, engine, recipe.bench, seed=recipe.seed, folder=folder, rows=rows)
        vllm = f"{engine.package} {engine.version}"
        provenance = make_provenance(ExportDir(path=folder), "bench", clock, engine=vllm)
        provenance = provenance.model_copy(update={"seed": recipe.seed})
        if rows is not None:
            found |= {"warnings": (*found["warnings"], _MAY_BE_KEPT), "images": rows.describe(encoder_cache=None)}
        record = BenchRecord(provenance=provenance, **found)
        if out is not None:
            write_text(out, record.model_dump_json(indent=1) + "\n")
        shutil.rmtree(folder / CELLS, ignore_errors=True)
    return record


def _refuse_too_long(bench_: Bench, endpoint: Endpoint, rows: ImageRows | None) -> None:
    if rows is not None:
        bench_ = bench_.model_copy(update={"input_tokens": rows.lengths})
    longest = max(load.input_tokens + load.output_tokens for load in bench_.plan.loads)
    limit = endpoint.facts.get("max_model_len", "")
    if limit.isdecimal() and longest > int(limit):
        raise InputError(
            f"bench.{'input_tokens' if bench_.grid == 'own' else 'grid'}: a request sends and asks for {longest} "
            f"tokens, more than the {limit} (max_model_len) of {endpoint.model} at {endpoint.url}; name another "
            "--grid, or set bench.input_tokens and bench.output_tokens"
        )
