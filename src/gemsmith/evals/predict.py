"""Answers to a file of prompts, `gemsmith predict`: of a run's model, or of any OpenAI server.

Answers are kept in OUT.partial/ as they come, each under a digest of what made it, so that the same command asks only
for those that are missing. OUT is written once each row has an answer or a reason why it has none. Those of shards, a
part of the rows each, are put together in the rows' order.
"""

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.data.dataset import describe_columns, read_prompts, source_sha256
from gemsmith.data.documents import Document
from gemsmith.data.images import validate_images
from gemsmith.data.workers import check_prompts_in_process
from gemsmith.errors import DataError, EngineError, InputError, some
from gemsmith.evals.cache import AnswerCache, digest_model, digest_question
from gemsmith.images.patches import PatchConfig, read_patching
from gemsmith.runs.eval_records import PredictRecord, Shard
from gemsmith.runs.records import read_record_file
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import Run, host_info, start_clock
from gemsmith.serve.client.batch import Request, ask_all
from gemsmith.serve.client.chat import Failure, Reply, api_messages, read_chat
from gemsmith.serve.client.endpoint import AnyServer, find_server
from gemsmith.serve.client.stream import SamplingParams
from gemsmith.serve.stage import Servers, with_room
from gemsmith.system.console import open_console, open_progress, print_warnings
from gemsmith.system.files import atomic_write, sha256_file, sha256_json, write_text
from gemsmith.system.format import counts
from gemsmith.system.locks import locked
from gemsmith.system.version import __version__

CONCURRENCY = 16
ROOM_STEP = 1024
_ALIKE = ("rows_sha256", "weights_sha256", "sampling")  # what is the same in all shards of the same rows


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Rows, the model that is asked, and how."""

    model: str
    digest: str  # SHA-256 of what makes the model's answers
    weights_sha256: str  # of its weights; of a server's, of what it says of them
    start: Callable[[], AnyServer]
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

    Raises DataError naming a row that cannot be asked, RunError where the weights are not what verify has passed,
    InputError where `out` is there already, EngineError where the server dies or answers no row.
    """
    checkpoint, key = open_checkpoint(run.recipe.checkpoint), str(rows)
    patching = read_patching(checkpoint.config, run.recipe.data.image_tokens)
    prompts, warnings = _read_rows(key, patching, shard)
    asked = [(row, len(row.messages)) for row in prompts]
    ids = check_prompts_in_process(checkpoint.folder, run.recipe.data, asked)
    run = _with_room(run, overrides, prompts, [len(each) for each in ids], sampling.max_tokens)
    with Servers(run, skip_verify_check=skip_verify_check) as servers:
        seen = next((row for row in prompts if row.images), None)
        if seen and not servers.takes_images:
            why = "has an image, and the run's models are served for text alone"
            raise DataError(f"{seen.origin}: {why}; --set serve.images=true")
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
    """The same by any OpenAI server, whose template renders the prompts; images are sent in their own size."""
    prompts, warnings = _read_rows(str(rows), PatchConfig(), shard)
    server = find_server(url, model)
    if server.max_model_len and sampling.max_tokens >= server.max_model_len:
        holds = f"{server.model} at {server.url} holds {server.max_model_len} tokens, prompt and answer together"
        raise InputError(f"--max-tokens {sampling.max_tokens}: {holds}; lower it")
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
    if shard:
        dataset = replace(dataset, documents=dataset.documents[shard.slice(count)])
    seen = validate_images(dataset, patching, bad="error", key=source)
    ignored = f"ignored the columns {describe_columns(seen.ignored_columns)}"
    return seen.documents, (*([ignored] if seen.ignored_columns else []), *seen.warnings)


def _with_room(
    run: Run, overrides: Sequence[str], prompts: Sequence[Document], lengths: Sequence[int], max_tokens: int
) -> Run:
    """The run with room for each prompt and its answer. Raises DataError naming the longest where it has none."""
    longest = max(lengths)
    needed = longest + max_tokens
    # In steps, so that a row more seldom makes another server, whose answers would be other ones.
    run = with_room(run, overrides, -(-needed // ROOM_STEP) * ROOM_STEP)
    holds = run.recipe.serve.max_model_len or recipe_variant(run.recipe).context
    if needed > holds:
        row = f"{prompts[lengths.index(longest)].origin}: its prompt has {longest} tokens"
        more = f"with --max-tokens {max_tokens} more than the {holds} that the server holds (serve.max_model_len)"
        remedy = f"lower --max-tokens, or --set serve.max_model_len={needed} where the model reads as many"
        raise DataError(f"{row}, {more}; {remedy}")
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
        failures = [reply for reply in found if isinstance(reply, Failure)]
        failed = Counter(failure.reason for failure in failures)
        if len(failures) == len(found):
            first = f"{failures[0].reason}: {failures[0].detail}"
            none = f"answered none of {len(found)} rows ({counts(failed)}); the first: {first}"
            raise EngineError(f"predict: {job.model} {none}")
        tokens = [reply.tokens for digest in missing if isinstance(reply := replies[digest], Reply)]
        if failed:
            told = f"rows without an answer: {failed.total()} of {len(found)} ({counts(failed)})"
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
            asked_tokens=None if None in tokens else sum(count or 0 for count in tokens),
            retries=cache.count_retries({*job.digests}),
            warnings=tuple(warnings),
        )
        lines = (_answer_line(row, reply) for row, reply in zip(job.prompts, found, strict=True))
        rate = f", {record.asked_tokens / asked_s:,.0f} tokens/s" if record.asked_tokens and asked_s else ""
        _write(record, lines, out, more=rate)
        if not failed:
            shutil.rmtree(partial)
    return record


def _write(record: PredictRecord, lines: Iterable[str], out: Path, *, more: str) -> None:
    """Writes the answers and the record beside them, and prints how many rows have one."""
    with atomic_write(out) as stream:
        stream.writelines(lines)
    write_text(record_file(out), record.model_dump_json(indent=1) + "\n")
    print_warnings("predict", record.warnings)
    answered = record.rows - sum(record.failed.values())
    open_console().print(f"predict: {answered:,} of {record.rows:,} rows answered{more}: {out}")


def _ask(job: _Job, cache: AnswerCache, missing: Mapping[str, Document], replies: dict[str, Reply | Failure]) -> float:
    """Asks for these answers, keeps each under its digest, and says how many seconds that took once a server was up."""
    digests, server = list(missing), job.start()
    sampling = {name: value for name, value in asdict(job.sampling).items() if value is not None}
    with open_progress(open_console()) as progress:
        bar = progress.add_task(f"predict {server.model}", total=len(digests))

        def heard(place: int, found: dict[str, Any] | Failure) -> None:
            replies[digests[place]] = reply = read_chat(found)
            if isinstance(reply, Reply):
                cache.add(digests[place], **asdict(reply))
            progress.advance(bar)

        bodies = (  # one by one: the images of all rows may not fit into memory
            {"model": server.model, "messages": api_messages(row.messages, row.images, job.patching), **sampling}
            for row in missing.values()
        )
        requests = (Request(path="/v1/chat/completions", body=body) for body in bodies)
        begin = start_clock()
        ask_all(
            server,
            requests,
            heard,
            concurrency=job.concurrency,
            retried=lambda at, why: cache.add(digests[at], retried=why),
        )
        return begin.elapsed_s()


def _answer_line(row: Document, reply: Reply | Failure) -> str:
    if isinstance(reply, Failure):
        answer: dict[str, Any] = {"answer": None, "error": f"{reply.reason}: {reply.detail}"}
    else:
        answer = {"answer": reply.text, "cut": reply.cut, "tokens": reply.tokens}
    return json.dumps({"row": row.origin, **answer}, ensure_ascii=False) + "\n"


def record_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.record.json")


def check_out(out: Path, inputs: Sequence[Path]) -> None:
    """Raises InputError where no file can be written there, or it is one of the inputs."""
    if out.is_dir() or not out.parent.is_dir() or out.resolve() in {file.resolve() for file in inputs}:
        raise InputError(f"--out {out}: must be a file of its own in a folder that is there")


def read_shard(text: str) -> Shard:
    """The shard that I/N names. Raises InputError."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise InputError(f"--shard {text}: must be I/N, with I from 1 to N, such as 1/4")
    return Shard(number=int(number), of=int(of))


def join_shards(files: Sequence[Path], out: Path, *, force: bool = False) -> PredictRecord:
    """Writes the answers of all shards to `out`, in whatever order the files are given, and returns what they are.

    Raises InputError for one missing, twice, not whole, or of other rows, model or sampling, RunError without a record.
    """
    check_out(out, files)
    if out.exists() and not force:
        raise InputError(f"--out {out}: is there already; --force replaces it")
    found: list[tuple[PredictRecord, Shard, Path]] = []
    for file in files:
        again = "run gemsmith predict for that shard"
        record = read_record_file(record_file(file), PredictRecord, missing=again, damaged=again)
        if record.shard is None:
            raise InputError(f"--join {file}: is no shard: predict wrote it without --shard; leave it out")
        found.append((record, record.shard, file))
    found.sort(key=lambda each: each[1].number)
    _check(found)
    records = [record for record, _, _ in found]
    failed = sum((Counter(record.failed) for record in records), Counter[str]())
    tokens = [record.asked_tokens for record in records]
    joined = records[0].model_copy(
        update={
            "started": min(record.started for record in records),
            "gemsmith": __version__,
            "machine": host_info(),
            "shard": None,
            "rows": sum(record.rows for record in records),
            "failed": dict(failed),
            "cut": sum(record.cut for record in records),
            "asked": sum(record.asked for record in records),
            "asked_s": round(sum(record.asked_s for record in records), 3),
            "asked_tokens": None if None in tokens else sum(count or 0 for count in tokens),
            "retries": dict(sum((Counter(record.retries) for record in records), Counter[str]())),
            "warnings": tuple(
                f"shard {shard.number}/{shard.of}: {warning}"
                for record, shard, _ in found
                for warning in record.warnings
            ),
        }
    )
    lines = (line for record, _, file in found for line in _lines(file, record.rows))
    _write(joined, lines, out, more=f" ({counts(failed)})" if failed else "")
    return joined


def _check(found: Sequence[tuple[PredictRecord, Shard, Path]]) -> None:
    """Raises InputError unless these, in the order of their numbers, are all shards of the same rows, once each."""
    first, shard, first_file = found[0]
    for record, other, file in found:
        if odd := [key for key in _ALIKE if getattr(record, key) != getattr(first, key)]:
            raise InputError(f"--join {file}: its {odd[0]} is not that of {first_file}; join shards of one command")
        if other.of != shard.of:
            raise InputError(f"--join {file}: is one of {other.of} shards, {first_file} one of {shard.of}")
    numbers = Counter(other.number for _, other, _ in found)
    if missing := [str(number) for number in range(1, shard.of + 1) if number not in numbers]:
        raise InputError(f"--join: of {shard.of} shards there is no {some(missing, 3)}; give the file of each")
    if twice := next((number for number, count in numbers.items() if count > 1), None):
        raise InputError(f"--join: shard {twice}/{shard.of} was given twice; leave one out")


def _lines(file: Path, rows: int) -> Iterator[str]:
    """The file's lines. Raises InputError, at their end, where there are not as many as its record says."""
    count = 0
    with file.open(encoding="utf-8") as stream:
        for count, line in enumerate(stream, start=1):  # noqa: B007
            yield line
    if count != rows:
        raise InputError(f"--join {file}: has {count} lines, its record says {rows}; run predict for that shard")
