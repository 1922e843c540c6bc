"""A green check means that nothing was left out: what hostile code is tried with is installed, or CI fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lock_hashes import MINORS

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SUITE = "tests/system/test_sandbox.py"


def test_the_workflow_installs_what_ci_run_installs():
    assert [file.name for file in WORKFLOWS] == ["ci.yml", "nightly.yml"]
    for file in (ROOT / ".ci" / "run", *WORKFLOWS):
        assert ".ci/packages" in file.read_text()
    assert {"bubblewrap", "iverilog", "dataset-fashion-mnist"} <= {*(ROOT / ".ci" / "packages").read_text().split()}


def test_the_workflow_does_what_ci_run_does_and_both_name_targets_that_are_there():
    steps = re.findall(r"make (\S.*)", (ROOT / ".ci" / "run").read_text())
    assert steps[:3] == ["check", "test", "test-slow"]
    assert steps == re.findall(r"run: make (\S.*)", WORKFLOWS[0].read_text())
    (job,) = yaml.safe_load(WORKFLOWS[1].read_text())["jobs"].values()
    named = [word for target in [*steps, *job["strategy"]["matrix"]["target"]] for word in target.split()]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{word.partition('=')[0]}( \?=|:)", makefile, re.M) for word in named)


def test_the_matrix_names_the_pythons_that_the_locks_are_for():
    (job,) = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in MINORS]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_every_action_is_pinned_by_a_commit_and_may_only_read(file):
    uses = re.findall(r"uses: (\S+)(.*)", file.read_text())
    assert uses and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action, _ in uses)
    assert all(re.fullmatch(r" # v\d+\.\d+\.\d+", version) for _, version in uses)
    assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_a_skip_of_a_suite_of_hostile_code_fails_in_ci(ci, code, tmp_path):
    command = [sys.executable, "-m", "pytest", SUITE, "-k", "home", "-p", "no:cacheprovider"]
    environment = os.environ | {"CI": ci, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert ("must not be skipped in CI: Skipped: bubblewrap is not installed" in done.stdout) == bool(ci)


def test_the_suites_that_are_never_skipped_are_there(request):
    suites = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py")).NEVER_SKIPPED_IN_CI
    assert len(suites) > 5 and all((ROOT / suite).exists() for suite in suites)
