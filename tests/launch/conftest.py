"""A recipe whose launch needs no file of this machine, and a stand-in for gcloud, kubectl and sky."""

import shlex
from pathlib import Path

import pytest

from gemsmith.launch.request import Options, make_request
from gemsmith.launch.targets import TARGETS

RECIPE = """\
model: gemma4-31b
checkpoint: gs://weights/gemma-4-31B-it
data:
  train: {task: verilog, rows: 2400}
train: {backend: trl, dtype: nf4, optimizer_steps: 300, rows_per_step: 4}
"""
# A stand-in says one of its answers; its words are kept with the ASCII unit separator between them. In sh, since a
# Python takes fifty times as long to start.
FAKE = """\
#!/bin/sh
{{ printf '%s\\037' "${{0##*/}}" "$@"; printf '\\n'; }} >>{log}
case "${{0##*/}} $*" in
{cases}
esac
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Returns the recipe's request: `launched("cloud-run", spot=True)`."""
    monkeypatch.chdir(tmp_path)
    Path("big.yaml").write_text(RECIPE)

    def make(on: str = "cloud-run", recipe: str = "big.yaml", **options):
        defaults = {"bucket": "gs://runs/team", "project": "demo-project"}
        if on == "tpu-vm":
            defaults["zone"] = "us-east5-a"
        if on != "cloud-run" and recipe == "big.yaml":
            tunix = ("train.backend=tunix", "train.dtype=bfloat16")
            options["overrides"] = (*tunix, *options.get("overrides", ()))
        return make_request(Path(recipe), TARGETS[on], on, Options(**defaults | options))

    return make


@pytest.fixture
def fake_tools(tmp_path, monkeypatch):
    """Puts gcloud, kubectl and sky on PATH that record what they are asked.

    `calls = fake_tools(("services list", 1, "no"))` answers a command with these words with 1 and a line on stderr,
    any other with 0; `calls()` are the commands so far.
    """
    folder, log = tmp_path / "tools", tmp_path / "calls"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def tell(*answers):
        log.unlink(missing_ok=True)
        cases = "\n".join(
            f"*{shlex.quote(part)}*) printf %s {shlex.quote(output)}{' >&2' if code else ''}; exit {code} ;;"
            for part, code, output in answers
        )
        for name in ("gcloud", "kubectl", "sky"):
            (folder / name).write_text(FAKE.format(log=shlex.quote(str(log)), cases=cases))
            (folder / name).chmod(0o755)
        return lambda: [line.split("\x1f")[:-1] for line in log.read_text().splitlines()] if log.exists() else []

    tell()
    return tell
