"""Tasks that answer a part of the rows each, of a run in a bucket: what is in the bucket is never asked for again."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_cloud.bucket import bucket_server
from fake_cloud.gcloud import FOLDER, INTERRUPT, PROJECT, read_state
from gemsmith.errors import EngineError
from gemsmith.launch.worker import run_on_worker
from gemsmith.runs.eval_records import PredictRecord
from gemsmith.runs.run import Run
from gemsmith.system.console import open_console
from gemsmith.system.storage import Bucket, files_below

ROOT = Path(__file__).parents[2]

TEXTS = [f"row {number}" for number in range(7)]
ASKED = json.dumps({"rows": "inputs/rows/rows.jsonl", "model": "tuned", "max_tokens": 8})


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemsmith.launch.sync._BETWEEN_LOOKS_S", 0.01)


@pytest.fixture
def store(exported_run: Callable[..., Run], tmp_path: Path) -> Path:
    """The bucket's folder, with a verified run and rows to answer."""
    short = {"data": {"max_length": 640}, "bench": {"input_tokens": [64], "output_tokens": 8}}
    run, store = exported_run(short | {"eval": {"concurrency": 1}}), tmp_path / "store"
    shutil.copytree(run.path, store / "run")
    (store / "launched" / "inputs" / "rows").mkdir(parents=True)
    shutil.copy(run.recipe_file, store / "launched" / "recipe.yaml")
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS)
    (store / "launched" / "inputs" / "rows" / "rows.jsonl").write_text(rows)
    return store


@pytest.fixture
def task(
    store: Path, fake_vllm: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Runs one task of two on a machine where nothing is; returns what vLLM was asked."""

    def run(number: int, asked: str = ASKED, **told: object) -> list[str]:
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        log = tmp_path / "asked"
        log.unlink(missing_ok=True)
        fake_vllm(answers={text: f"<{text}>" for text in TEXTS}, asked=str(log), **told)
        monkeypatch.setenv("CLOUD_RUN_TASK_INDEX", str(number))
        monkeypatch.setenv("CLOUD_RUN_TASK_COUNT", "2")
        arguments = (f"file://{store}", tmp_path / "work", ["predict"], lambda *_: pytest.fail("a stage"))
        try:
            run_on_worker(*arguments, open_console(), asked=asked)
        except EngineError:
            assert told
        return log.read_text().splitlines() if log.exists() else []

    return run


def answers(store: Path) -> list[str]:
    return [json.loads(line)["answer"] for line in (store / "run" / "answers.jsonl").read_text().splitlines()]


def test_a_task_that_dies_is_resumed_and_the_last_joins_all_in_order(
    task: Callable[..., list[str]], store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in (store / "run").rglob("*") if file.is_file()}
    task(1, die_after=2)
    assert "of 2 parts" not in capfd.readouterr().err and not (store / "run" / "answers.jsonl").exists()
    assert len(task(1)) == 2
    assert "predict: of 2 parts 1 are still to come" in capfd.readouterr().err
    assert not (store / "run" / "answers.jsonl").exists()
    assert len(task(0)) == 3
    assert answers(store) == [f"<{text}>" for text in TEXTS]
    record = PredictRecord.model_validate_json((store / "run" / "answers.jsonl.record.json").read_text())
    assert (record.rows, record.failed, record.shard) == (7, {}, None)
    assert {file: file.read_bytes() for file in before} == before and not (store / "writer").exists()


def test_a_part_that_is_whole_is_kept_and_other_sampling_is_another_question(
    task: Callable[..., list[str]], store: Path
) -> None:
    task(0), task(1)
    (store / "run" / "answers.jsonl").unlink()
    assert task(0) == [] and answers(store) == [f"<{text}>" for text in TEXTS]
    assert len(task(0, ASKED.replace("8", "9"))) == 3
    assert len(list((store / "answers").iterdir())) == 2


def test_rows_in_a_bucket_are_read_there(task: Callable[..., list[str]], store: Path) -> None:
    rows = store / "launched" / "inputs" / "rows" / "rows.jsonl"
    Bucket(f"file://{store}").write("elsewhere/mine.jsonl", rows.read_bytes())
    rows.unlink()
    assert len(task(0, ASKED.replace("inputs/rows/rows", f"file://{store}/elsewhere/mine"))) == 3


GEMSMITH = """\
#!{python}
import sys, time
import gemsmith.evals.cache as cache, gemsmith.launch.sync as sync
add, sync._BETWEEN_LOOKS_S = cache.AnswerCache.add, 0.05
cache.AnswerCache.add = lambda *given, **said: (time.sleep(0.2), add(*given, **said))
from gemsmith.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_job_of_two_tasks_loses_a_machine_and_all_rows_come_home(
    store: Path, fake_vllm: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the Cloud Run of this machine, from `gemsmith launch` to `gemsmith launch fetch`."""
    tools = tmp_path / "serve" / "bin"
    tools.mkdir(parents=True)
    fake = Path(__file__).parents[1] / "serve" / "fake_vllm.py"
    texts = [f"row {number}" for number in range(20)]
    text = fake_vllm(answers={text: f"<{text}>" for text in texts}).read_text()
    # Below a folder that the job sees.
    (tools / "python").write_text(text.replace(str(fake), str(shutil.copy(fake, tools))))
    (tools / "gcloud").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/scripts/fake_cloud "$@"\n')
    (tools / "gemsmith").write_text(GEMSMITH.format(python=sys.executable))
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    with bucket_server() as bucket:
        for name, file in files_below(store / "run"):
            bucket.objects[f"my/run/{name}"] = (1, file.read_bytes())
        environment = {
            **os.environ,
            **bucket.environment,
            FOLDER: str(tmp_path / "cloud"),
            INTERRUPT: "gs://runs/my/answers/*/1-of-2/run/*.partial/*",
            "GEMSMITH_SERVE_PYTHON": str(tools / "python"),
            "PATH": f"{tools}:{os.environ['PATH']}",
        }

        def gemsmith(*arguments: object) -> None:
            command = [tools / "gemsmith", "launch", *map(str, arguments)]
            subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)

        job = ("--stages", "predict", "--rows", "rows.jsonl", "--tasks", 2, "--max-tokens", 8, "--timeout-hours", 1)
        where = ("--provider", "cloud-run", "--project", PROJECT, "--bucket", "gs://runs", "--image", "local/gemsmith")
        gemsmith(store / "launched" / "recipe.yaml", "--name", "my", *where, *job, "--submit", "--yes")
        execution = tmp_path / "cloud" / "executions" / "my-1"
        deadline = time.monotonic() + 120
        while not (state := read_state(execution))["ended"] and time.monotonic() < deadline:
            time.sleep(0.1)
        log = (execution / "log.txt").read_text()
        ends = sorted((each["task"], each["number"], each["ended_by"], each["code"]) for each in state["attempts"])
        assert ends == [(0, 0, "interruption", 143), (0, 1, "itself", 0), (1, 0, "itself", 0)], log
        assert "of 10 answers are there from an earlier start" in log
        gemsmith("fetch", "my")
    home = tmp_path / "runs" / "my" / "answers.jsonl"
    assert [json.loads(line)["answer"] for line in home.read_text().splitlines()] == [f"<{text}>" for text in texts]
