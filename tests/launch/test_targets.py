import re
import subprocess
from pathlib import Path

import pytest
import yaml

from gemsmith import __version__
from gemsmith.launch.providers import TARGETS

from .conftest import FOUR_TASKS

GOLDEN = Path(__file__).parent / "golden"
RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = ("demo", "demo_images", "own", "pets_31b", "verilog_31b")


def rendered(shipped, on: str, recipe: str, **options) -> dict[str, str]:
    request = shipped(on, recipe, **options)
    files = TARGETS[on].render(request)
    del files["recipe.yaml"]  # it has every key of recipes, whose changes are no launch's
    return {name: without_versions(text) for name, text in files.items()}


def without_versions(text: str) -> str:
    """Without what changes with a version, a test's folder or the plan's formulas."""
    text = text.replace(str(RECIPES), "RECIPES").replace(__version__, "VERSION").replace(str(Path.cwd()), "HERE")
    return re.sub(r"(# Estimated: ).*", r"\1HOURS", text)


def test_all_recipes_that_are_shipped_are_rendered():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*SHIPPED}


@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize("on", TARGETS)
def test_shipped_recipes_are_rendered_as_they_were(shipped, on, recipe):
    """Wanted changes: delete the folder, run this test twice, and read the difference."""
    compare(GOLDEN / on / recipe, rendered(shipped, on, recipe))


def test_two_slices_are_rendered_as_they_were(shipped):
    compare(GOLDEN / "gke" / "two_slices", rendered(shipped, "gke", "verilog_31b", machine="2xv6e-16"))


def test_uvs_python_is_rendered_as_it_was(shipped, wheel):
    compare(GOLDEN / "tpu-vm" / "uv_wheel", rendered(shipped, "tpu-vm", "verilog_31b", wheel=wheel))


def test_four_tasks_of_predict_are_rendered_as_they_were(shipped):
    compare(GOLDEN / "cloud-run" / "predict", rendered(shipped, "cloud-run", "pets_31b", **FOUR_TASKS))


def test_a_service_of_streamed_weights_is_rendered_as_it_was(shipped):
    files = rendered(shipped, "cloud-run", "verilog_31b", load="stream", max_replicas=3)
    compare(GOLDEN / "cloud-run" / "stream", {name: files[name] for name in ("service.yaml", "serve.sh")})


@pytest.mark.parametrize(("name", "options"), [
    ("tpu_service", {"serve_machine": "v6e-8", "max_replicas": 4}),
    ("gpu_service", {"serve_machine": "2xh100", "load": "stream"}),
])  # fmt: skip
def test_a_service_on_kubernetes_is_rendered_as_it_was(shipped, name, options):
    files = rendered(shipped, "gke", "verilog_31b", **options)
    compare(GOLDEN / "gke" / name, {name: files[name] for name in ("service.yaml", "serve.sh")})
    job = {name: files[name] for name in files if name not in ("service.yaml", "serve.sh")}
    assert job == rendered(shipped, "gke", "verilog_31b"), "the job is the same with a service and without"


def compare(folder, files):
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


def test_bash_can_read_every_script(subtests):
    assert len(SCRIPTS) >= 6
    for script in SCRIPTS:
        with subtests.test(str(script.relative_to(GOLDEN))):
            subprocess.run(["bash", "-n", str(script)], check=True)


def test_every_manifest_is_yaml_with_the_label(subtests):
    assert len(MANIFESTS) >= 3
    for manifest in MANIFESTS:
        with subtests.test(str(manifest.relative_to(GOLDEN))):
            documents = list(yaml.safe_load_all(manifest.read_text()))
            assert documents and all("gemsmith-run" in str(document) for document in documents)
