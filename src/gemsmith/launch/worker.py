"""What a launched machine does: the stages of the recipe in the bucket, the run directory kept there as it goes."""

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from gemsmith.errors import GemsmithError, InputError
from gemsmith.launch.request import FOLDER
from gemsmith.launch.shards import PACKED, unpack
from gemsmith.launch.sync import LAUNCHED, RUN, RunSync
from gemsmith.runs.run import Run, open_source
from gemsmith.runs.stages import SERVED
from gemsmith.system.locks import locked
from gemsmith.system.storage import Bucket
from gemsmith.train.stage import is_later_host

RunStage = Callable[[Run, str], object]
_AT_ONCE = 8
"""Objects that are fetched at the same time."""
_READERS_OF_MERGED = {"verify", *SERVED}
"""Stages for which the merged weights are fetched, which are as large as the model."""


def run_on_worker(root: str, folder: Path, stages: Sequence[str], run_stage: RunStage, console: Console) -> Run:
    """The run, once its stages have ended well; what is complete in the bucket is not done again.

    Started again, on this machine or another, it resumes from the last stage and saved step in the bucket. Of several
    hosts only the first writes there, and the others end with training.
    """
    bucket, first = Bucket(root), not is_later_host()
    launched, path = folder / "launched", folder / "run"
    _fetch_launched(bucket, launched)
    mirror = RunSync(bucket, path)
    if first:
        mirror.acquire_lease()
    there = bucket.names(RUN)
    left = {stage for stage in stages if f"{RUN}{stage}.json" not in there}
    mirror.fetch(without=() if _READERS_OF_MERGED & left else ("merged",))
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


def _fetch_launched(bucket: Bucket, folder: Path) -> None:
    names = bucket.names(LAUNCHED)
    if f"{LAUNCHED}recipe.yaml" not in names:
        raise InputError(f"{bucket.url}: holds no {LAUNCHED}recipe.yaml; launch with: gemsmith launch RECIPE --submit")
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        mine = [name for name in names if ".." not in name.split("/")]
        [*threads.map(lambda name: bucket.download(name, folder / name.removeprefix(LAUNCHED)), mine)]
    for packed in sorted((folder / PACKED).glob("*")):
        unpack(packed, folder / FOLDER / packed.name)
