"""What a launched machine does: the stages of the recipe in the bucket, the run directory kept there as it goes.

Last it answers rows, where it is asked to; tasks of one job share them, and the last to end joins their parts:

    ROOT/answers/KEY/1-of-2/run/answers.jsonl.partial/   answers so far, from which another attempt resumes
                                answers.jsonl            of that part, with its record beside it
    ROOT/run/answers.jsonl                               of all rows, in their order, with the counts of all

KEY is of rows, weights and sampling, so that parts of one question never meet those of another.
"""

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from gemsmith.errors import GemsmithError, InputError
from gemsmith.launch.provider import PREDICT, READERS_OF_MERGED
from gemsmith.launch.request import FOLDER
from gemsmith.launch.shards import PACKED, unpack
from gemsmith.launch.sync import LAUNCHED, RUN, RunSync
from gemsmith.runs.eval_records import Shard
from gemsmith.runs.run import Run, open_source
from gemsmith.system.files import sha256_json
from gemsmith.system.locks import locked
from gemsmith.system.storage import Bucket
from gemsmith.train.stage import is_later_host

ANSWERS = "answers.jsonl"
RunStage = Callable[[Run, str], object]
_AT_ONCE = 8  # objects that are fetched at the same time


def run_on_worker(
    root: str, folder: Path, stages: Sequence[str], run_stage: RunStage, console: Console, *, asked: str | None = None
) -> Run:
    """The run, once its stages have ended well; what is complete in the bucket is not done again.

    Started again, on this machine or another, it resumes from the last stage and saved step in the bucket. Of several
    hosts only the first writes there, and the others end with training. Last it answers the rows of `asked`, if given;
    tasks that do nothing else only read the run.
    """
    stages = [stage for stage in stages if stage != PREDICT]
    bucket, first = Bucket(root), bool(stages) and not is_later_host()
    launched, path = folder / "launched", folder / "run"
    _fetch_launched(bucket, launched)
    mirror = RunSync(bucket, path)
    if first:
        mirror.acquire_lease()
    there = bucket.names(RUN)
    left = {stage for stage in stages if f"{RUN}{stage}.json" not in there}
    mirror.fetch(without=() if READERS_OF_MERGED & {*left, *([PREDICT] if asked else [])} else ("merged",))
    attempt = os.environ.get("CLOUD_RUN_TASK_ATTEMPT", "")
    number = f"attempt {attempt}: " if attempt.isdecimal() else ""
    records = ", ".join(sorted(file.stem for file in path.glob("*.json"))) or "nothing"
    steps = len(list((path / "checkpoints").glob("*")))
    console.print(f"{number}complete in the bucket: {records}; saved steps: {steps}")
    with contextlib.chdir(launched), contextlib.ExitStack() as stack:
        run = open_source(Path("recipe.yaml"), path, lock=lambda held: stack.enter_context(locked(held)))
        for stage in stages:
            if first:
                _run_mirrored(run, stage, run_stage, mirror, console)
            else:
                run_stage(run, stage)
                if stage == "train":
                    break
        if first:
            # The report comes home with the records; an image of one's own may lack what draws it.
            try:
                importlib.import_module("gemsmith.report.page").report(run)
            except (GemsmithError, OSError, ModuleNotFoundError) as error:
                console.print(f"report: warning: not written ({error}); at home: gemsmith report RUN")
            mirror.send()
        if asked is not None:
            _answer_rows(run, bucket, folder, asked, console)
    return run


def _run_mirrored(run: Run, stage: str, run_stage: RunStage, mirror: RunSync, console: Console) -> None:
    try:
        with mirror.watching() if stage == "train" else contextlib.nullcontext():
            run_stage(run, stage)
    finally:
        # Also of a stage that failed: its log says why.
        mirror.send()
    for failure in mirror.failures:
        console.print(f"{stage}: warning: a saved step reached the bucket only at a later try: {failure}")


def _answer_rows(run: Run, bucket: Bucket, folder: Path, asked: str, console: Console) -> None:
    """Answers this task's part of the rows. `asked`: JSON of rows, model and the fields of SamplingParams."""
    from gemsmith.data.dataset import source_sha256
    from gemsmith.evals.predict import predict_run
    from gemsmith.serve.client.stream import SamplingParams

    how = json.loads(asked)
    rows, model = how.pop("rows"), how.pop("model")
    if rows.startswith(("gs://", "file://")):
        place, _, name = rows.rpartition("/")
        rows = str(folder / "rows" / name)
        Bucket(place).download(name, Path(rows))
    made = (bucket.read(f"{RUN}export.json") or b"").decode() if model == "tuned" else run.recipe.checkpoint
    key = sha256_json([source_sha256(rows), model, made, how])[:12]
    index, count = int(os.environ.get("CLOUD_RUN_TASK_INDEX", "0")), int(os.environ.get("CLOUD_RUN_TASK_COUNT", "1"))
    shard = Shard(number=index + 1, of=count)
    parts = Bucket(f"{bucket.url}/answers/{key}")
    mine = folder / f"{shard.number}-of-{count}"
    sync = RunSync(Bucket(f"{parts.url}/{mine.name}"), mine)
    sync.acquire_lease()
    sync.fetch()
    out = mine / ANSWERS
    if out.exists() and not out.with_name(f"{ANSWERS}.partial").exists():
        console.print(f"predict: part {shard.number} of {count} is complete in the bucket")
    else:
        mine.mkdir(parents=True, exist_ok=True)
        try:
            with sync.watching(sync.send):
                predict_run(run, Path(rows), out, model=model, sampling=SamplingParams(**how), shard=shard)
        finally:
            # Also of a start that is ended: the next one asks for the others.
            sync.send()
    _join_parts(bucket, parts, count, folder / "joined", console)


def _join_parts(bucket: Bucket, parts: Bucket, count: int, folder: Path, console: Console) -> None:
    """Puts the parts together where all are there: each task looks once its own is, so the last to end finds them."""
    from gemsmith.evals.predict import join_shards, record_file

    files, there = [folder / f"{number}-of-{count}" / RUN / ANSWERS for number in range(1, count + 1)], parts.names()
    names = [str(name.relative_to(folder)) for file in files for name in (file, record_file(file))]
    if missing := {name.partition("/")[0] for name in names if name not in there}:
        console.print(f"predict: of {count} parts {len(missing)} are still to come; the last task to end joins them")
        return
    for name in names:
        parts.download(name, folder / name)
    out = folder / ANSWERS
    join_shards(files, out, force=True)
    for file in (out, record_file(out)):
        bucket.upload(file, RUN + file.name)


def _fetch_launched(bucket: Bucket, folder: Path) -> None:
    names = bucket.names(LAUNCHED)
    if f"{LAUNCHED}recipe.yaml" not in names:
        raise InputError(f"{bucket.url}: holds no {LAUNCHED}recipe.yaml; launch with: gemsmith launch RECIPE --submit")
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        mine = [name for name in names if ".." not in name.split("/")]
        [*threads.map(lambda name: bucket.download(name, folder / name.removeprefix(LAUNCHED)), mine)]
    for packed in sorted((folder / PACKED).glob("*")):
        unpack(packed, folder / FOLDER / packed.name)
