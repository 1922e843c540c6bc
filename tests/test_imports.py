"""The command line, planning and the training loop stay light. pyproject.toml holds who may import whom."""

import subprocess
import sys
from pathlib import Path

HEAVY = {
    *("jax", "flax", "qwix", "tunix", "optax", "orbax", "grain", "PIL", "torch", "transformers", "peft", "accelerate"),
    *("matplotlib", "gradio", "trl", "datasets"),
}


def loaded_by(code: str) -> set[str]:
    script = f"import sys; {code}; print(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_the_command_line_loads_nothing_heavy():
    assert not loaded_by("import gemsmith.cli") & (HEAVY | {"numpy", "pydantic", "rich", "yaml"})


def test_planning_loads_nothing_heavy():
    assert not loaded_by("import gemsmith.plan.stage, gemsmith.runs.resolve, gemsmith.runs.run") & (
        HEAVY | {"numpy", "rich"}
    )


def test_what_a_plan_warns_of_is_found_without_numpy():
    recipe = str(Path(__file__).parents[1] / "recipes" / "verilog_31b.yaml")
    asked = f"plan_warnings(Run(path=Path(), recipe=load_recipe({recipe!r})))"
    names = "from gemsmith.pipeline.preflight import plan_warnings; from gemsmith.recipe.load import load_recipe"
    run = "from gemsmith.runs.run import Run; from pathlib import Path"
    assert "numpy" not in loaded_by(f"{names}; {run}; {asked}")


def test_a_training_session_loads_no_backend():
    assert not loaded_by("import gemsmith.train.loop, gemsmith.train.inputs") & {"jax", "torch", "tunix", "trl"}


def test_training_in_jax_loads_no_torch():
    """tensorboardX would, which Tunix imports."""
    loaded = loaded_by("import gemsmith.train.jax.backend")
    assert "torch" not in loaded and {"tunix", "tensorboardX"} <= loaded
