import re
import subprocess
from pathlib import Path

import pytest
import yaml

from gemsmith import __version__
from gemsmith.launch.targets import TARGETS

GOLDEN = Path(__file__).parent / "golden"
RECIPES = Path(__file__).parents[2] / "recipes"
MADE = ("data.train={task: verilog, rows: 2400}", "data.eval={task: verilog, rows: 20, split: held-out}")
SHIPPED = {
    "demo": (f"checkpoint={RECIPES}/demo_base", "train.optimizer_steps=600"),
    "own": (*MADE, "train.optimizer_steps=600"),
    "verilog_31b": (*MADE, "train.optimizer_steps=300", "data.format=auto"),
}
"""Recipe -> what stands in for files that a user brings, and a number of steps, which the data stage counts."""
FOR_GPU = ("train.backend=trl",)


def rendered(launched, on: str, recipe: str) -> dict[str, str]:
    overrides = SHIPPED[recipe] + (FOR_GPU if on == "cloud-run" else ())
    if (on, recipe) == ("cloud-run", "verilog_31b"):
        overrides += ("train.dtype=nf4", "train.rows_per_step=4", "checkpoint=gs://weights/gemma-4-31B-it")
    cluster = {"cluster": "c1"} if on == "gke" else {}
    request = launched(on, str(RECIPES / f"{recipe}.yaml"), overrides=overrides, timeout_hours=12, **cluster)
    files = TARGETS[on].render(request)
    del files["recipe.yaml"]  # it has every key of recipes, whose changes are no launch's
    return {name: without_versions(text) for name, text in files.items()}


def without_versions(text: str) -> str:
    """Without what changes with a version or the plan's formulas."""
    text = text.replace(str(RECIPES), "RECIPES").replace(__version__, "VERSION")
    return re.sub(r"(# Modelled: ).*", r"\1HOURS", text)


@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize("on", TARGETS)
def test_shipped_recipes_are_rendered_as_they_were(launched, on, recipe, request):
    """Wanted changes: delete the folder, run this test twice, and read the difference."""
    folder = GOLDEN / on / recipe
    files = rendered(launched, on, recipe)
    if not folder.exists():
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        pytest.fail(f"{folder} was made; read it, and run the test again")
    assert {path.name for path in folder.iterdir()} == files.keys()
    for name, text in files.items():
        assert text == (folder / name).read_text(), name


SCRIPTS = sorted(GOLDEN.rglob("*.sh"))
MANIFESTS = sorted(path for path in GOLDEN.rglob("*.yaml") if path.name != "recipe.yaml")


def test_the_golden_files_are_found():
    assert len(SCRIPTS) >= 6 and len(MANIFESTS) >= 3


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: "/".join(path.parts[-3:]))
def test_bash_can_read_every_script(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: "/".join(path.parts[-3:]))
def test_every_manifest_is_yaml_with_the_label(manifest):
    documents = list(yaml.safe_load_all(manifest.read_text()))
    assert documents and all("gemsmith-run" in str(document) for document in documents)
