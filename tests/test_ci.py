"""A green check means that nothing was left out: what hostile code is tried with is installed, or CI fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITE = "tests/system/test_sandbox.py"


def test_the_workflow_installs_what_ci_run_installs():
    for file in (".ci/run", ".github/workflows/ci.yml"):
        assert ".ci/packages" in (ROOT / file).read_text()
    assert {"bubblewrap", "iverilog", "dataset-fashion-mnist"} <= {*(ROOT / ".ci" / "packages").read_text().split()}


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
