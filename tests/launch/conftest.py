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


RECIPES = Path(__file__).parents[2] / "recipes"
MADE = ("data.train={task: verilog, rows: 2400}", "data.eval={task: verilog, rows: 20, split: held-out}")
SHIPPED = {
    "demo": (f"checkpoint={RECIPES}/demo_base", "train.optimizer_steps=600"),
    "own": (*MADE, "train.optimizer_steps=600"),
    "verilog_31b": (*MADE, "train.optimizer_steps=300", "data.format=auto"),
}
"""Recipe -> what stands in for files that a user brings, and a number of steps, which the data stage counts."""
FOR_GPU = ("train.backend=trl",)


@pytest.fixture
def shipped(launched):
    """Returns the request of a recipe in the folder recipes: `shipped("gke", "demo")`."""

    def make(on: str, recipe: str, **options):
        overrides = SHIPPED[recipe] + (FOR_GPU if on == "cloud-run" else ())
        if (on, recipe) == ("cloud-run", "verilog_31b"):
            overrides += ("train.dtype=nf4", "train.rows_per_step=4", "checkpoint=gs://weights/gemma-4-31B-it")
        cluster = {"cluster": "c1"} if on == "gke" else {}
        return launched(on, str(RECIPES / f"{recipe}.yaml"), overrides=overrides, timeout_hours=12, **cluster | options)

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
