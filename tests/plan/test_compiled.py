"""What a compiler says in place of the formula; a stand-in compiles, whose program is that of tests/plan/aot/golden."""

from pathlib import Path

import pytest

from gemsmith.errors import InputError, MachineError
from gemsmith.hardware import load_catalog
from gemsmith.plan import compiled as plan_compiled
from gemsmith.plan.aot import compile as child
from gemsmith.plan.aot import compile as compiled
from gemsmith.plan.aot.compile import Limits
from gemsmith.plan.compiled import SLOWEST, cache_folder, cache_key
from gemsmith.plan.stage import plan_only
from gemsmith.recipe.load import with_values

SCAN = Path(__file__).parent / "aot" / "golden" / "scan_v5p.hlo"
V5P = load_catalog().machines["v5p-8"]
LIMITS = Limits(seconds=10, memory_bytes=1e9)
GIB = 2**30


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Has plans compile with a stand-in: `compiler(peak_gib=20)` or `compiler(error="XLA: no")`; gives what it was
    asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "check_compiler", lambda: None)
    monkeypatch.setattr(plan_compiled, "_versions", lambda: {"libtpu": "1"})

    def make(*, peak_gib: float = 20.0, error: str | None = None) -> list[str]:
        asked: list[str] = []

        def compile_in_child(recipe, folder, *, topology, images, limits):
            asked.append(topology if images is None else f"{topology} {images.images} x {images.soft_tokens}")
            assert recipe.train.mesh != "auto" and limits == LIMITS
            if error:
                raise MachineError(error)
            (folder / "step.hlo").write_text(SCAN.read_text())
            return {
                "coordinates": [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]],
                "peak_bytes": int(peak_gib * GIB),
                "argument_bytes": 1,
                "remat": "layer",
                "trace_cpu_s": 1.0,
                "compile_cpu_s": 2.0,
                "peak_rss_bytes": 5,
            }

        monkeypatch.setattr(child, "compile_in_child", compile_in_child)
        return asked

    return make


def test_the_compilers_memory_and_time_replace_the_formulas(compiler, recipe):
    asked = compiler()
    asked_for = recipe(machines=("v5p-8", "1xh100"))
    formula = plan_only(asked_for).machines[0]
    machine, gpu = plan_only(asked_for, limits=LIMITS).machines
    step = machine.compiled
    assert asked == ["v5p:2x2x1"] and gpu.compiled is None
    assert machine.hbm_bytes_per_chip == 20 * GIB and machine.fits and machine.step_s == step.step_s
    assert step.formula_bytes == formula.hbm_bytes_per_chip and step.formula_step_s == formula.step_s
    assert step.step_s[1] >= SLOWEST * step.program_s["as_scheduled"] * 0.999
    assert machine.hours[1] < formula.hours[1], "the stand-in's step is short"
    assert any("compiled for v5p:2x2x1 in 3 CPU-s: 20.0 GiB a chip, by formula" in note for note in machine.notes)


def test_a_step_is_compiled_once_and_again_when_it_changes(compiler, recipe):
    asked = compiler()
    first, second = (plan_only(recipe(machines=("v5p-8",)), limits=LIMITS).machines[0] for _ in range(2))
    assert len(asked) == 1 and second.compiled == first.compiled.model_copy(update={"cached": True})
    plan_only(recipe(machines=("v5p-8",), save_steps=7), limits=LIMITS)
    assert len(asked) == 1, "how often is saved changes no program"
    plan_only(recipe(machines=("v5p-8",), global_batch_size=4), limits=LIMITS)
    assert len(asked) == 2


def test_a_step_with_images_is_compiled_with_them(compiler, recipe):
    asked, rows = compiler(), recipe(machines=("v5p-8",))
    rows = with_values(rows, [("bench.images", True), ("data.packing", False)])
    with_images = plan_only(rows, limits=LIMITS).machines[0]
    assert asked == ["v5p:2x2x1 1 x 288"] and with_images.compiled.peak_bytes == 20 * GIB
    plan_only(with_values(rows, [("bench.images", False)]), limits=LIMITS)
    assert asked[1:] == ["v5p:2x2x1"], "another program"


def test_the_key_knows_versions_and_code(recipe, monkeypatch):
    monkeypatch.setattr(plan_compiled, "_versions", lambda: {"libtpu": "1"})
    before = cache_key(recipe(), V5P)
    assert before == cache_key(recipe(), V5P)
    monkeypatch.setattr(plan_compiled, "_versions", lambda: {"libtpu": "2"})
    after = cache_key(recipe(), V5P)
    monkeypatch.setattr(plan_compiled, "SOURCES", ("arch",))
    assert len({before, after, cache_key(recipe(), V5P)}) == 3


def test_what_does_not_fit_by_the_compiler_does_not_fit(compiler, recipe):
    compiler(peak_gib=100)
    (machine,) = plan_only(recipe(machines=("v5p-8",)), limits=LIMITS).machines
    assert not machine.fits and machine.notes[0] == "needs 100.0 GiB a chip of 95.7, says the compiler"
    assert machine.hours is None


@pytest.mark.parametrize(("error", "kept"), [("XLA: RESOURCE_EXHAUSTED", True), ("compiling took more than", False)])
def test_a_refusal_is_kept_and_a_limit_of_today_is_not(compiler, recipe, error, kept):
    compiler(error=error)
    (machine,) = plan_only(recipe(machines=("v5p-8",)), limits=LIMITS).machines
    assert not machine.fits and error in machine.notes[0] and machine.compiled.error == error
    assert cache_folder().exists() == kept


def test_a_damaged_entry_is_compiled_again(compiler, recipe):
    asked = compiler()
    plan_only(recipe(machines=("v5p-8",)), limits=LIMITS)
    (file,) = cache_folder().iterdir()
    file.write_text("{")
    assert plan_only(recipe(machines=("v5p-8",)), limits=LIMITS).machines[0].fits and len(asked) == 2


def test_without_a_tpu_among_the_machines_nothing_is_compiled(compiler, recipe):
    compiler()
    with pytest.raises(InputError, match=r"--compile: the step of train\.backend tunix is not compiled for 1xh100"):
        plan_only(recipe(machines=("1xh100",)), limits=LIMITS)
