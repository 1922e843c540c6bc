"""One list of what would stop a run: plan warns of it, run and launch refuse all of it at once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemsmith import run as gemsmith_run
from gemsmith.errors import InputError, ProblemsError
from gemsmith.pipeline import preflight
from gemsmith.pipeline.preflight import CHECKS, find_problems, refuse_problems
from gemsmith.recipe.load import load_recipe
from gemsmith.runs.resolve import resolve_file
from gemsmith.runs.run import Run
from gemsmith.runs.stages import STAGES
from support.cases import each

MISSING = (
    *("data.train=gone.jsonl", "train.init_adapter=gone", "eval.scorer=./gone.py", "data.eval=held.jsonl"),
    "eval.tasks=[{task: verilog, dataset: problems, prompt: gone.txt}]",
)
SAID = (
    "gone.jsonl: does not exist; name a JSONL",
    "held.jsonl: does not exist; name a JSONL",
    "gone: has no adapter_config.json",
    "gone.py cannot be read (No such file or directory); name a Python file",
    "gone.txt: cannot be read (No such file or directory); name a text file",
    "problems: is not a folder; give that of verilog-eval",
)


def sets(*settings: str) -> list[str]:
    return [word for each in settings for word in ("--set", each)]


def test_a_plan_warns_of_all_that_is_missing(gemsmith: Any, recipe: Path) -> None:
    for more in ([], ["--run", "runs/planned"]):
        code, out, err = gemsmith("plan", recipe, *sets(*MISSING), *more)
        assert code == 0 and "v5p-8" in out
        lines = err.splitlines()
        assert len(lines) == len(SAID) and all(line.startswith("plan: warning: ") for line in lines)
        assert all(any(said in line for line in lines) for said in SAID), err


def test_a_plan_runs_no_task_file_that_is_there(gemsmith: Any, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    rows = "{task: ./mine.py, rows: 4}"
    mine = sets(f"data.train={rows}", f"data.eval={rows}", "eval.scorer=./mine.py", "data.packing=false")
    code, _, err = gemsmith("plan", recipe, *mine)
    assert (code, err) == (0, "") and not (tmp_path / "ran").exists()
    launched = ("--provider", "cloud-run", "--project", "p", "--bucket", "gs://runs", "--print", "out")
    gemsmith("launch", recipe, *launched, *mine)
    assert not (tmp_path / "ran").exists()
    assert gemsmith("run", recipe, *mine)[0] == 2 and (tmp_path / "ran").exists()


def test_run_and_launch_refuse_all_at_once_and_write_nothing(gemsmith: Any, recipe: Path) -> None:
    wrong = sets("lora.rank=100000", "train.checkpoint_folder=/etc/mine", *MISSING)
    launched = ("--provider", "cloud-run", "--project", "p", "--bucket", "gs://runs", "--print", "out")
    for command in (["run", recipe], ["launch", recipe, *launched, "--stages", ",".join(STAGES)], ["plan", recipe]):
        code, _, err = gemsmith(*command, *wrong)
        lines = err.splitlines()
        assert code == 2 and all(line.startswith("error: ") for line in lines), err
        for said in (
            *SAID,
            "lora.rank: 100000 was given; no matrix",
            "train.checkpoint_folder: /etc/mine is the system",
        ):
            assert sum(said in line for line in lines) == 1, (command, said, err)
        assert not Path("runs").exists() and not Path("out").exists()


def test_a_run_directory_of_the_systems_is_refused(gemsmith: Any, recipe: Path) -> None:
    for folder in ("/etc/gemsmith", "/usr/runs", "/dev/../etc/x"):
        code, _, err = gemsmith("plan", recipe, "--run", folder)
        assert code == 2 and err.startswith(f"error: run directory {folder}: is the system's; name a folder of"), err


def test_a_stage_that_is_complete_is_not_asked(recipe: Path) -> None:
    run = Run(path=Path("runs/my"), recipe=resolve_file(recipe, ["data.train=gone.jsonl"], stages=())[0])
    assert [name for name, _ in find_problems(run, ["data"]).values()] == ["files"]
    assert find_problems(run, ["train"], "names") == {}


def test_a_vllm_that_is_missing_stops_no_training(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(path=tmp_path / "run", recipe=resolve_file(recipe, ["serve.python=/nowhere"])[0])
    (said,) = refuse_problems(run, ["plan", "serve"])
    assert said.startswith("serve.python: /nowhere does not exist")
    assert refuse_problems(run, ["serve", "bench"]) == []  # which say so themselves


def test_the_list_is_of_known_stages_and_an_error_that_is_no_input_is_raised(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(CHECKS) >= 14
    assert {stage for check in CHECKS.values() for stage in check.stages} == {*STAGES}
    run = Run(path=Path("runs/my"), recipe=resolve_file(recipe)[0])

    def fail(_: preflight.Case) -> str:
        raise ZeroDivisionError

    monkeypatch.setitem(CHECKS, "files", CHECKS["files"]._replace(find=fail))
    with pytest.raises(ZeroDivisionError):
        find_problems(run, ["data"])


def test_several_problems_are_an_error_with_a_line_for_each() -> None:
    error = ProblemsError([InputError("a: b\n c"), InputError("d")])
    assert str(error) == "a: b c\nd" and error.exit_code == 2 and len(error.problems) == 2


def test_python_is_told_all_at_once_too(recipe: Path) -> None:
    wrong = [*MISSING, "lora.rank=100000", "train.mesh={tp: 3}"]
    with pytest.raises(ProblemsError) as error:
        gemsmith_run(load_recipe(recipe, wrong), "runs/python")
    told = str(error.value)
    assert all(said in told for said in (*SAID, "lora.rank: 100000 was given", "train.mesh.tp: 3 does not split"))
    assert not Path("runs").exists()


IMPOSSIBLE = {
    "train.init_adapter=/etc": "adapter /etc: has no adapter_config.json; give a folder that",
    "lora.rank=100000": "lora.rank: 100000 was given; no matrix of tiny-31b with an adapter has more",
    "lora.targets=[qq]": "lora.targets: 'qq' matches nothing (did you mean q?); allowed: q, k, v",
    f"train.max_steps={10**22}": f"train.max_steps: {10**22} was given, input should be less than",
    f"data.max_length={10**22}": f"data.max_length: {10**22} was given, input should be less than",
    f"train.global_batch_size={10**9}": f"train.global_batch_size: {10**9} was given, input should be less than",
    "optimizer.learning_rate=.inf": "optimizer.learning_rate: inf was given, input should be",
    "train.mesh={replica: 64, fsdp: 1}": "8 rows do not divide over replica × fsdp = 64; set a multiple of 64",
    "train.compiler_options={xla_no_such_flag: true}": "train.compiler_options.xla_no_such_flag: the recipe sets it",
    "train.checkpoint_folder=/etc/mine": "train.checkpoint_folder: /etc/mine is the system's; name a folder",
    "checkpoint=/etc": "checkpoint /etc: has no config.json; give a folder that holds",
    "eval.scorer=./gone.py": "gone.py cannot be read (No such file or directory); name a Python file",
    "hardware.machines=[v9x]": "hardware.machines: 'v9x' is not in the catalog; allowed: ",
}


@each(("setting", "said"), IMPOSSIBLE.items())
def test_a_setting_that_cannot_be_is_one_line_before_rows_are_made(
    gemsmith: Any, recipe: Path, setting: str, said: str
) -> None:
    code, _, err = gemsmith("run", recipe, "--set", setting)
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and said in line and "Traceback" not in err, err
    assert not {"data.json", "train.json", "data", "checkpoints"} & {path.name for path in Path("runs").rglob("*")}


def test_a_library_that_a_check_of_files_lacks_is_told_by_its_extra(tmp_path: Path) -> None:
    recipe = tmp_path / "my.yaml"
    asked = "eval: {tasks: [{task: verilog, dataset: problems, prompt: ./prompt.txt}]}"
    recipe.write_text(f"model: tiny-31b\ncheckpoint: base\ndata: {{train: rows.jsonl}}\n{asked}\n")
    code = "import sys; sys.modules['numpy'] = None; from gemsmith.cli import main; main(['plan', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", code, recipe], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "error: numpy is not installed, which this needs; run: pip install 'gemsmith[serve]'" in done.stderr
