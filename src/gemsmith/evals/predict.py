"""Answers to a file of prompts, `gemsmith predict`: of a run's model, or of any OpenAI server.

Answers are kept in OUT.partial/ as they come, each under a digest of what made it, so that the same command asks only
for those that are missing. OUT is written once each row has an answer or a reason why it has none.
"""

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemsmith.checkpoints import open_checkpoint, read_config
from gemsmith.data.chat_template import find_template
from gemsmith.data.dataset import describe_columns, read_prompts, source_sha256
from gemsmith.data.documents import Document
from gemsmith.data.images import validate_images
from gemsmith.data.workers import check_prompts_in_process
from gemsmith.errors import DataError, EngineError, InputError
from gemsmith.evals.cache import AnswerCache, digest_model, digest_question
from gemsmith.evals.generate import describe_counts
from gemsmith.evals.shards import check_out, record_file
from gemsmith.images.patches import PatchConfig, read_patching
from gemsmith.runs.eval_records import PredictRecord, Shard
from gemsmith.runs.provenance import host_info, start_clock
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import Run
from gemsmith.serve.client.batch import Request, ask_all
from gemsmith.serve.client.chat import Failure, Reply, api_messages, read_chat
from gemsmith.serve.client.endpoint import RemoteServer, find_server
from gemsmith.serve.client.stream import SamplingParams
from gemsmith.serve.server import Server
from gemsmith.serve.stage import Servers, with_room
from gemsmith.system.console import open_console, open_progress, print_warnings
from gemsmith.system.files import atomic_write, sha256_file, sha256_json, write_text
from gemsmith.system.locks import locked
from gemsmith.system.version import __version__

CONCURRENCY = 16
ROOM_STEP = 1024


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Rows, the model that is asked, and how."""

    model: str
    digest: str
    """SHA-256 of what makes the model's answers."""
    weights_sha256: str
    """Of its weights; of a server's, of what it says of them."""
    start: Callable[[], Server | RemoteServer]
    patching: PatchConfig | None = None
    rows: Path
    shard: Shard | None
    prompts: Sequence[Document]
    sampling: SamplingParams
    concurrency: int

    @functools.cached_property
    def digests(self) -> list[str]:
        """Of each row; equal rows have one answer."""
        drawn = asdict(self.sampling)
        return [
            digest_question(self.digest, row.messages, drawn=drawn, images=[image.sha256 for image in row.images])
            for row in self.prompts
        ]


def predict_run(
    run: Run,
    rows: Path,
    out: Path,
    *,
    model: str = "tuned",
    overrides: Sequence[str] = (),
    skip_verify_check: bool = False,
    sampling: SamplingParams,
    concurrency: int | None = None,
    shard: Shard | None = None,
    force: bool = False,
) -> PredictRecord:
    """Writes each row's answer by the run's `model`, tuned or base, to `out`; vLLM is started only if one is missing.

    It has room for the longest prompt and answer, unless the user has set serve.max_model_len, as in `overrides`.

    Raises DataError naming a row that cannot be asked, RunError where the weights are not what verify has passed,
    InputError where `out` is there already, EngineError where the server dies or answers no row.
    """
    checkpoint, key = open_checkpoint(run.recipe.checkpoint), str(rows)
    patching = read_patching(read_config(checkpoint.folder), run.recipe.data.image_tokens)
    prompts, warnings = _read_rows(key, patching, shard)
    template = find_template(checkpoint.folder, run.recipe.data.template)
    ids = check_prompts_in_process(checkpoint.folder, template, [(row, len(row.messages)) for row in prompts])
    run = _with_room(run, overrides, prompts, [len(each) for each in ids], sampling.max_tokens)
    with Servers(run, skip_verify_check=skip_verify_check) as servers:
        seen = next((row for row in prompts if row.images), None)
        if seen and not servers.takes_images:
            raise DataError(
                f"{seen.origin}: has an image, and the run's models are served for text alone; --set serve.images=true"
            )
        if model == "tuned":
            servers.check_verified()  # also where all answers are there from an earlier start
            weights = run.merged, sha256_file(run.record_file("export"))
        else:
            weights = checkpoint.folder, checkpoint.fingerprint()
        job = _Job(
            model=f"{model} model of {run.path}",
            digest=digest_model(run, *weights, sampling.max_tokens),
            weights_sha256=weights[1],
            start=servers.tuned if model == "tuned" else servers.base,
            patching=patching,
            rows=rows,
            shard=shard,
            prompts=prompts,
            sampling=sampling,
            concurrency=concurrency or run.recipe.eval.concurrency,
        )
        return _predict(job, out, force=force, warnings=(*warnings, *servers.warnings))


def predict_url(
    url: str,
    rows: Path,
    out: Path,
    *,
    model: str | None = None,
    sampling: SamplingParams,
    concurrency: int | None = None,
    shard: Shard | None = None,
    force: bool = False,
) -> PredictRecord:
    """The same by any OpenAI server, whose template renders the prompts; images are sent in their own size.

    The key is in $VLLM_API_KEY or $OPENAI_API_KEY, if there is one.
    """
    prompts, warnings = _read_rows(str(rows), PatchConfig(), shard)
    server = find_server(url, model)
    if server.max_model_len and sampling.max_tokens >= server.max_model_len:
        raise InputError(
            f"--max-tokens {sampling.max_tokens}: {server.model} at {server.url} holds {server.max_model_len} tokens, "
            "prompt and answer together; lower it"
        )
    job = _Job(
        model=f"{server.model} at {server.url}",
        digest=server.digest,
        weights_sha256=sha256_json([server.model, server.root]),
        start=lambda: server,
        rows=rows,
        shard=shard,
        prompts=prompts,
        sampling=sampling,
        concurrency=concurrency or CONCURRENCY,
    )
    return _predict(job, out, force=force, warnings=warnings)


def _read_rows(source: str, patching: PatchConfig, shard: Shard | None) -> tuple[Sequence[Document], tuple[str, ...]]:
    """The prompts of a shard, or all, their images looked at, and what a reader must know of them."""
    dataset = read_prompts(source)
    count = len(dataset.documents)
    if shard and shard.of > count:
        raise InputError(f"--shard {shard.number}/{shard.of}: {source} has {count} rows; take no more shards than that")
    documents = dataset.documents[shard.slice(count)] if shard else dataset.documents
    seen = validate_images(documents, patching, bad="error", key=source)
    ignored = f"ignored the columns {describe_columns(dataset.ignored_columns)}"
    return seen.documents, (*([ignored] if dataset.ignored_columns else []), *seen.warnings)


def _with_room(
    run: Run, overrides: Sequence[str], prompts: Sequence[Document], lengths: Sequence[int], max_tokens: int
) -> Run:
    """The run with room for each prompt and its answer. Raises DataError naming the longest where it has none."""
    longest = max(lengths)
    needed = longest + max_tokens
    # In steps, so that a row more seldom makes another server, whose answers would be other ones.
    run = with_room(run, overrides, -(-needed // ROOM_STEP) * ROOM_STEP, why="the longest prompt and its answer")
    holds = run.recipe.serve.max_model_len or recipe_variant(run.recipe).context
    if needed > holds:
        raise DataError(
            f"{prompts[lengths.index(longest)].origin}: its prompt has {longest} tokens, with --max-tokens "
            f"{max_tokens} more than the {holds} that the server holds (serve.max_model_len); lower --max-tokens, or "
            f"--set serve.max_model_len={needed} where the model reads as many"
        )
    return run


def _predict(job: _Job, out: Path, *, force: bool, warnings: Sequence[str] = ()) -> PredictRecord:
    partial = out.with_name(f"{out.name}.partial")
    check_out(out, [job.rows])
    if out.exists() and not partial.exists() and not force:
        raise InputError(f"--out {out}: is there already; --force asks for all its answers again")
    clock = start_clock()
    with locked(partial, what="answers for"):
        cache = AnswerCache(partial / "answers.jsonl")
        if force:
            cache.files[0].unlink(missing_ok=True)
        replies: dict[str, Reply | Failure] = {**cache.replies()}
        missing = {digest: row for digest, row in zip(job.digests, job.prompts, strict=True) if digest not in replies}
        if kept := len({*job.digests}) - len(missing):
            open_console().print(f"predict: {kept} of {kept + len(missing)} answers are there from an earlier start")
        asked_s = _ask(job, cache, missing, replies) if missing else 0.0
        found = [replies[digest] for digest in job.digests]
        failed = _count_failures(found, job.model)
        counts = [reply.tokens for digest in missing if isinstance(reply := replies[digest], Reply)]
        if failed:
            told = f"rows without an answer: {failed.total()} of {len(found)} ({describe_counts(failed)})"
            warnings = (*warnings, f"{told}; the same command asks for them again")
        record = PredictRecord(
            started=clock.started,
            gemsmith=__version__,
            machine=host_info(),
            model=job.model,
            weights_sha256=job.weights_sha256,
            rows=len(found),
            rows_sha256=source_sha256(str(job.rows)),
            shard=job.shard,
            sampling=asdict(job.sampling),
            failed=dict(failed),
            cut=sum(isinstance(reply, Reply) and reply.cut for reply in found),
            asked=len(missing),
            asked_s=round(asked_s, 3),
            asked_tokens=None if None in counts else sum(count or 0 for count in counts),
            retries=cache.count_retries({*job.digests}),
            warnings=tuple(warnings),
        )
        with atomic_write(out) as file:
            for row, reply in zip(job.prompts, found, strict=True):
                file.write(json.dumps({"row": row.origin, **_answer(reply)}, ensure_ascii=False) + "\n")
        write_text(record_file(out), record.model_dump_json(indent=1) + "\n")
        if not failed:
            shutil.rmtree(partial)
    print_warnings("predict", record.warnings)
    rate = f", {record.asked_tokens / asked_s:,.0f} tokens/s" if record.asked_tokens and asked_s else ""
    open_console().print(f"predict: {len(found) - failed.total():,} of {len(found):,} rows answered{rate}: {out}")
    return record


def _count_failures(found: Sequence[Reply | Failure], model: str) -> Counter[str]:
    """Failures by their reason. Raises EngineError with the first where there is no answer."""
    failures = [reply for reply in found if isinstance(reply, Failure)]
    failed = Counter(failure.reason for failure in failures)
    if len(failures) == len(found):
        raise EngineError(
            f"predict: {model} answered none of {len(found)} rows ({describe_counts(failed)}); the first: "
            f"{failures[0].reason}: {failures[0].detail}"
        )
    return failed


def _ask(job: _Job, cache: AnswerCache, missing: Mapping[str, Document], replies: dict[str, Reply | Failure]) -> float:
    """Asks for these answers, keeps each under its digest, and says how many seconds that took once a server was up."""
    digests, server = list(missing), job.start()
    sampling = {name: value for name, value in asdict(job.sampling).items() if value is not None}
    with open_progress(open_console()) as progress:
        bar = progress.add_task(f"predict {server.model}", total=len(digests))

        def heard(place: int, found: dict[str, Any] | Failure) -> None:
            replies[digests[place]] = reply = read_chat(found)
            if isinstance(reply, Reply):
                cache.add_reply(digests[place], reply)
            progress.advance(bar)

        def retried(place: int, reason: str) -> None:
            cache.add_retry(digests[place], reason)

        bodies = (  # one by one: the images of all rows may not fit into memory
            {"model": server.model, "messages": api_messages(row.messages, row.images, job.patching), **sampling}
            for row in missing.values()
        )
        requests = (Request(path="/v1/chat/completions", body=body) for body in bodies)
        begin = start_clock()
        ask_all(server, requests, heard, concurrency=job.concurrency, retried=retried)
        return begin.elapsed_s()


def _answer(reply: Reply | Failure) -> dict[str, Any]:
    if isinstance(reply, Failure):
        return {"answer": None, "error": f"{reply.reason}: {reply.detail}"}
    return {"answer": reply.text, "cut": reply.cut, "tokens": reply.tokens}
