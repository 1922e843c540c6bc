"""A recipe whose launch needs no file of this machine, and a stand-in for gcloud, kubectl and sky."""

import json
import shlex
from pathlib import Path

import pytest

from gemsmith.launch.provider import LaunchOptions
from gemsmith.launch.providers import TARGETS
from gemsmith.launch.request import make_request
from gemsmith.launch.upload import LOCKS, WHEEL

RECIPE = """\
model: gemma4-31b
checkpoint: gs://weights/gemma-4-31B-it
data:
  train: {task: verilog, rows: 2400}
train: {backend: trl, dtype: nf4, max_steps: 300, global_batch_size: 4}
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
        return make_request(Path(recipe), TARGETS[on], on, LaunchOptions(**defaults | options))

    return make


RECIPES = Path(__file__).parents[2] / "recipes"
GENERATORS = ("data.train={task: verilog, rows: 2400}", "data.eval={task: verilog, rows: 20, split: held-out}")
SHIPPED = {
    "demo": (f"checkpoint={RECIPES}/demo_base", "train.max_steps=600"),
    "demo_images": (
        "data.train=build/fashion_mnist/train",
        "data.eval=build/fashion_mnist/held_out",
        f"checkpoint={RECIPES}/demo_images_base",
        "train.max_steps=250",
    ),
    "own": (*GENERATORS, "train.max_steps=600"),
    "pets_31b": ("data.train=pets/trainval.jsonl", "data.eval=pets/test.jsonl", "train.max_steps=690"),
    "verilog_31b": (*GENERATORS, "train.max_steps=300", "data.format=auto"),
}
"""Recipe -> what stands in for files that a user brings, and a number of steps, which the data stage counts."""
FOR_GPU = ("train.backend=trl",)
PETS_ON_TPU = (
    "train.backend=tunix",
    "train.dtype=bfloat16",
    "train.double_quant=false",
    "train.gradient_accumulation_steps=1",
    "hardware.machines=[v6e-8]",
)
FOUR_TASKS = {
    "stages": "predict",
    "rows": "pets/test.jsonl",
    "tasks": 4,
    "sampling": {"model": "tuned", "max_tokens": 128},
}
"""Options of a launch that answers rows with images, each task a part."""
IN_BUCKET = ("checkpoint=gs://weights/gemma-4-31B-it",)


def write_images(folder: Path) -> None:
    """What demo_images and pets_31b read, two images a part: made by `gemsmith prepare` for those who use them."""
    for part in ("build/fashion_mnist/train", "build/fashion_mnist/held_out", "pets/images"):
        for name in ("bag", "coat"):
            file = folder / part / name / "0.png" if part != "pets/images" else folder / part / f"{name}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(f"a {name} of {part}".encode())
    for split, name in (("trainval", "bag"), ("test", "coat")):
        row = {"image": f"images/{name}.jpg", "prompt": "Which?", "response": name, "labels": ["bag", "coat"]}
        (folder / "pets" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")


@pytest.fixture
def shipped(launched, tmp_path):
    """Returns the request of a recipe in the folder recipes: `shipped("gke", "demo")`."""
    write_images(tmp_path)

    def make(on: str, recipe: str, **options):
        overrides = SHIPPED[recipe] + (FOR_GPU if on == "cloud-run" else ())
        if (on, recipe) == ("cloud-run", "verilog_31b"):
            overrides += ("train.dtype=nf4", "train.global_batch_size=4", *IN_BUCKET)
        if (on, recipe) == ("cloud-run", "pets_31b"):
            overrides += IN_BUCKET
        elif recipe == "pets_31b":
            overrides += PETS_ON_TPU
        cluster = {"cluster": "c1"} if on == "gke" else {}
        return launched(on, str(RECIPES / f"{recipe}.yaml"), overrides=overrides, timeout_hours=12, **cluster | options)

    return make


@pytest.fixture
def wheel(tmp_path):
    """A folder as `make build/wheel` makes it."""
    folder = tmp_path / "wheel"
    folder.mkdir()
    for name in (WHEEL, *LOCKS):
        (folder / name).write_text("x")
    return folder


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
