"""The task `verilog`: specifications of a folder of verilog-eval's, answered in Verilog, judged by simulation."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gemsmith.system.sandbox import Sandbox, find_sandbox
from gemsmith.tasks.base import Question, QuestionSet, Sampling, Verdict
from gemsmith.tasks.verilog import prompts
from gemsmith.tasks.verilog.simulate import Bench, find_simulator, judge, open_bench, problems_sha256, read_problems

SAMPLING = Sampling(samples=5, temperature=0.8, top_p=0.95)
"""Those of arXiv 2605.25645."""
PROMPTS = tuple(prompts.PROMPTS)


@dataclass(frozen=True, kw_only=True)
class Judges:
    """The problems that can be judged here, each with its testbench, by name, and why the others cannot."""

    benches: Mapping[str, Bench]
    ungraded: Mapping[str, str]
    sandbox: Sandbox
    simulator: str

    @property
    def tool(self) -> str:
        return self.simulator

    @property
    def sandboxed(self) -> bool:
        return self.sandbox.bubblewrap is not None

    def score(self, question: Question, answers: Sequence[str]) -> list[Verdict]:
        """Whether each answer's TopModule does what the reference does, in the problem's own testbench."""
        bench = self.benches[question.origin]
        found = [judge(bench, answer, self.sandbox) for answer in answers]
        return [Verdict(right=each.passed, reason=each.reason, detail=each.detail) for each in found]


def read_questions(folder: Path, *, prompt: str) -> QuestionSet:
    """Every problem of the folder, asked as `prompt` says, one of PROMPTS. Raises DataError."""
    problems = read_problems(folder)
    ask = prompts.PROMPTS[prompt]
    questions = tuple(
        Question(
            messages=ask(problem.prompt), expected=problem.reference, origin=problem.name, columns={"problem": problem}
        )
        for problem in problems
    )
    return QuestionSet(questions=questions, sha256=problems_sha256(problems))


def open_judges(questions: Sequence[Question], *, unsafe: bool = False) -> Judges:
    """What judges answers to these questions: each problem's reference is run first, since not all can be run here.

    Raises MachineError without simulator or sandbox; `unsafe` does without the latter.
    """
    simulator, sandbox = find_simulator(), find_sandbox(unsafe=unsafe)
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        opened = [pool.submit(open_bench, question.columns["problem"], sandbox) for question in questions]
        found = {question.origin: each.result() for question, each in zip(questions, opened, strict=True)}
    finally:  # also after Ctrl-C: what has not begun need not be waited for
        pool.shutdown(wait=False, cancel_futures=True)
    return Judges(
        benches={name: bench for name, bench in found.items() if isinstance(bench, Bench)},
        ungraded={
            name: f"its own reference does not pass: {bench.reason}, {bench.detail}"
            for name, bench in found.items()
            if not isinstance(bench, Bench)
        },
        sandbox=sandbox,
        simulator=simulator,
    )
