"""The task with questions of its own: what is asked, what cannot be judged here, and verdicts."""

from pathlib import Path

import pytest

from gemsmith.errors import DataError, MachineError
from gemsmith.tasks.base import Verdict
from gemsmith.tasks.messages import text_of
from gemsmith.tasks.verilog import task as verilog

from .verilog.conftest import PROMPT, REFERENCE, TESTBENCH, sandbox  # noqa: F401 - a fixture

RIGHT = REFERENCE.replace("RefModule", "TopModule")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    for name, more in (("Prob001_and", ""), ("Prob002_broken", "module ;")):
        (tmp_path / f"{name}_prompt.txt").write_text(PROMPT)
        (tmp_path / f"{name}_ref.sv").write_text(REFERENCE)
        (tmp_path / f"{name}_test.sv").write_text(TESTBENCH + more)
    return tmp_path


def test_each_problem_is_a_question_of_its_name_asked_as_the_prompt_says(dataset):
    official, fenced, paper = (verilog.read_questions(dataset, prompt=prompt) for prompt in verilog.PROMPTS)
    assert [question.origin for question in official.questions] == ["Prob001_and", "Prob002_broken"]
    assert [message.role for message in official.questions[0].messages] == ["system", "user"]
    assert PROMPT.strip() in text_of(fenced.questions[0].messages[-1]) and official.sha256 == fenced.sha256
    (asked,) = paper.questions[0].messages
    assert asked.role == "user" and text_of(asked).startswith(PROMPT.strip()) and "TopModule" in text_of(asked)
    with pytest.raises(DataError, match="is not a folder"):
        verilog.read_questions(dataset / "nothing", prompt="official")


@pytest.mark.usefixtures("sandbox")
def test_a_testbench_that_cannot_be_compiled_here_is_no_fault_of_any_answer(dataset):
    questions = verilog.read_questions(dataset, prompt="official").questions
    judges = verilog.open_judges(questions)
    assert list(judges.ungraded) == ["Prob002_broken"]
    assert judges.ungraded["Prob002_broken"].startswith("its own reference does not pass: compile error")
    assert judges.sandboxed and judges.tool.startswith("Icarus Verilog")
    assert judges.score(questions[0], [RIGHT, RIGHT.replace("&", "|"), "no"])[0] == Verdict(right=True)
    wrong, none = judges.score(questions[0], [RIGHT.replace("&", "|"), "no"])
    assert (wrong.right, wrong.reason, none.reason) == (False, "wrong output", "no module")
    assert wrong.detail.endswith("samples differ")


def test_without_a_simulator_nothing_is_opened(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MachineError, match="iverilog is not installed"):
        verilog.open_judges(())
