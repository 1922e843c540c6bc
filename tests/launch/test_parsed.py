"""Every gcloud command that Gemsmith runs, renders, advises or documents, read by gcloud's own parser of flags."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from gemsmith.launch.commands import follow_command, preflight, resources
from gemsmith.launch.providers import TARGETS

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
HUB = ("checkpoint=google/gemma-4-31B-it",)
PARSE = """
import contextlib, io, json, sys
sys.path[:0] = sys.argv[1:]
from googlecloudsdk import gcloud_main
parser = gcloud_main.CreateCLI([])._CLI__parser
wrong = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(words)
    except (SystemExit, Exception) as error:
        wrong.append(" ".join(["gcloud", *words]) + ": " + said.getvalue() + repr(error))
print(json.dumps(wrong))
"""


def in_text(text: str) -> Iterator[list[str]]:
    """The commands of a script, a page or a line of advice; what a shell would put in is the word value."""
    for line in text.splitlines():
        for found in re.finditer(r"(?:^|[(`]|: |^# .*: )(gcloud [a-z].*?)(?:$|[)`|;]|, | >| \|\|)", line.strip()):
            yield shlex.split(re.sub(r'"[^"]*\$[^"]*"', "value", found[1]))


def of_preflight(requests: Iterable, on: str) -> Iterator[list[str]]:
    for request in requests:
        for check in preflight(request, on, TARGETS[on].values(request)):
            yield list(check.command)
            yield from in_text(check.remedy)


def of_record(record, on: str) -> Iterator[list[str]]:
    record, logs = (
        record.model_copy(update={"target": on}),
        follow_command(record.model_copy(update={"target": on}), "logs"),
    )
    yield from (list(follow_command(record, "status")), list(logs))
    yield shlex.split(logs[-1].partition("; ")[2].partition(" | ")[0])  # where they are in a pipe
    for resource in (*resources(record, "running"), *resources(record, "created")):
        yield from (list(resource.list), [word.replace("{}", "name") for word in resource.remove])


def of_files() -> Iterator[list[str]]:
    scripts = [*GOLDEN.rglob("*.sh"), ROOT / "docs" / "how-to" / "launch.md", ROOT / "docs" / "how-to" / "images.md"]
    scripts += [path for path in GOLDEN.rglob("*.yaml") if "gcloud" in path.read_text()]
    for script in scripts:
        yield from in_text(script.read_text())


@pytest.fixture
def everything(launched, launch_record):
    """Each command once, without the word gcloud."""
    found = [*of_files()]
    for on in TARGETS:
        more = {"gke": {"cluster": "c1"}, "cloud-run": {"network": "n", "subnet": "s"}}.get(on, {})
        stages = {"stages": "plan,data,train", "timeout_hours": 12, **more}
        larger = {"machine": "cloud-run-44"} if on == "cloud-run" else {}
        requests = [launched(on, **stages), launched(on, overrides=HUB, secret="hf-token", **stages, **larger)]
        if on == "gke":
            requests.append(launched(on, machine="v6e-16", overrides=("train.global_batch_size=16",), **stages))
        there = launch_record.model_copy(update={"project": "demo-project", "zone": "us-east5-a", "cluster": "c1"})
        found += [*of_preflight(requests, on), *of_record(there, on)]
    # What stands for a project in the documentation cannot be one.
    known = (["demo-project" if word == "P" else word for word in command] for command in found)
    words = {tuple(command[1:]) for command in known if command[:1] == ["gcloud"]}
    return sorted(words)


def test_the_commands_are_found(everything):
    verbs = {" ".join(words[:3]) for words in everything}
    assert {"storage cp --recursive", "storage rsync --recursive", "run jobs replace"} <= verbs
    assert {"container clusters get-credentials", "secrets versions describe", "run services proxy"} <= verbs
    assert len(everything) > 60


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_reads_every_command(everything, tmp_path):
    library = Path(os.path.realpath(shutil.which("gcloud"))).parents[1] / "lib"
    for name in ("job.yaml", "service.yaml"):  # which are read with the flags
        shutil.copy(GOLDEN / "cloud-run" / "own" / name, tmp_path)
    command = ["python3", "-c", PARSE, str(library), str(library / "third_party")]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        input=json.dumps(everything),
        env={**os.environ, "CLOUDSDK_CONFIG": str(tmp_path)} | {"PYTHONPATH": "", "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
