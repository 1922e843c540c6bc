"""Answers in a file, scored by the command line."""

import json

import pytest

from gemsmith.errors import MachineError
from gemsmith.system.sandbox import find_sandbox
from gemsmith.tasks.verilog.simulate import find_simulator

from ..tasks.verilog.conftest import PROMPT, REFERENCE, TESTBENCH

RIGHT = "```verilog\n" + REFERENCE.replace("RefModule", "TopModule") + "```"
WRONG = RIGHT.replace("&", "|")


@pytest.fixture
def simulator():
    """Skips where nothing is simulated."""
    try:
        find_simulator(), find_sandbox()
    except MachineError as error:
        pytest.skip(str(error))


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name in ("Prob001_and", "Prob002_and", "Prob003_broken", "Prob004_and"):
        (folder / f"{name}_prompt.txt").write_text(PROMPT)
        (folder / f"{name}_ref.sv").write_text(REFERENCE)
        (folder / f"{name}_test.sv").write_text(TESTBENCH + "module ;" * (name == "Prob003_broken"))
    return folder


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        file = tmp_path / "answers.jsonl"
        file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        return file

    return write


def answer(problem, completion):
    return {"problem": problem, "completion": completion}


@pytest.mark.usefixtures("simulator")
def test_each_problem_has_its_samples_its_passes_and_why_the_others_did_not(gemsmith, dataset, write):
    file = write(
        *(answer("Prob001_and", text) for text in (RIGHT, WRONG, RIGHT, "no", RIGHT)),
        *(answer("Prob002_and", WRONG) for _ in range(5)),
        *(answer("Prob003_broken", RIGHT) for _ in range(2)),
    )
    code, out, _ = gemsmith("eval", "--task", "verilog", "--dataset", dataset, "--answers", file, "--json")
    record = json.loads(out)
    first, second, broken = record["problems"]
    assert code == 0 and record["sandbox"] is True and record["unanswered"] == record["left_out"] == 1
    assert (first["name"], first["samples"], first["passed"]) == ("Prob001_and", 5, 3)
    assert first["reasons"] == {"no module": 1, "wrong output": 1}
    assert (second["samples"], second["passed"], second["reasons"]) == (5, 0, {"wrong output": 5})
    assert broken["ungraded"].startswith("its own reference does not pass: compile error")
    scores = {each["k"]: (each["score"], each["low"], each["high"]) for each in record["pass_at"]}
    assert scores[1][0] == pytest.approx(0.3) and scores[5][0] == 0.5  # the broken problem does not count


@pytest.mark.usefixtures("simulator")
def test_the_table_says_what_does_not_count(gemsmith, dataset, write):
    file = write(answer("Prob001_and", RIGHT), answer("Prob003_broken", RIGHT))
    code, _, err = gemsmith("eval", "--task", "verilog", "--dataset", dataset, "--answers", file)
    assert code == 0
    assert "pass@1 100.0%" in err and "pass@5" not in err
    assert "1 problems do not count" in err and "2 problems of the dataset have no answer" in err


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["not json\n"], "answers.jsonl line 1, column 1: is not JSON"),
        ([answer("Prob001_and", "x"), "[]\n"], "line 2: must be"),
        ([answer("Prob001_and", 3)], "line 1: must be"),
        ([answer("Prob001_andd", "x")], "'Prob001_andd' is no problem of the dataset (did you mean Prob001_and?)"),
        (["\n"], "holds no answer"),
    ],
)
@pytest.mark.usefixtures("simulator")
def test_a_file_that_cannot_be_read_is_one_line(gemsmith, dataset, write, rows, said):
    file = write(*rows)
    code, out, err = gemsmith("eval", "--task", "verilog", "--dataset", dataset, "--answers", file)
    assert (code, out) == (2, "") and said in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--task is missing"),
        (["--task", "verilog"], "--dataset is missing"),
        (["runs/x", "--task", "verilog"], "--dataset is missing; --task must come with it"),
        (["runs/x", "--samples", "3"], "--task is missing; --samples must come with it"),
        (["runs/x", "--task", "verilog", "--dataset", "d", "--answers", "a"], "--answers: does not go with SOURCE"),
        (["--task", "verilog", "--dataset", "d", "--answers", "a", "--samples", "3"], "--samples: is for answers"),
        (["--task", "verilog", "--dataset", "d", "--answers", "a", "--force"], "--force: goes with SOURCE"),
        (["--task", "verilog", "--dataset", "nowhere", "--answers", "a", "--unsafe"], "nowhere: is not a folder"),
        (["--task", "other"], "'other' is not"),
    ],
)
def test_what_does_not_go_together_is_one_line(gemsmith, monkeypatch, arguments, said):
    monkeypatch.setattr("gemsmith.tasks.verilog.simulate.find_simulator", lambda: "Icarus Verilog")
    code, out, err = gemsmith("eval", *arguments)
    assert (code, out) == (2, "") and said in err and len(err.strip().splitlines()) == 1


def test_without_a_simulator_it_is_one_line(gemsmith, monkeypatch, dataset, write):
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = gemsmith(
        "eval", "--task", "verilog", "--dataset", dataset, "--answers", write(answer("Prob001_and", RIGHT))
    )
    assert code == 2 and "iverilog is not installed" in err and "package iverilog" in err
