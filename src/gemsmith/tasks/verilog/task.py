"""The task `verilog`: specifications of a folder of verilog-eval's, answered in Verilog, judged by simulation.

The sentences in OFFICIAL_SYSTEM and OFFICIAL_RULE are those of scripts/sv-generate in NVlabs/verilog-eval at commit
c498220, for the task spec-to-rtl and with no option set: a score is comparable with a published one only where the
model was asked the same. Their license is in verilog_eval_license.txt.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gemsmith.system.sandbox import find_sandbox
from gemsmith.tasks.base import PLACE, Judges, Question, QuestionSet, Sampling, Verdict
from gemsmith.tasks.messages import Message, text_message
from gemsmith.tasks.verilog import simulate

SAMPLING = Sampling(samples=5, temperature=0.8, top_p=0.95)  # those of arXiv 2605.25645
OFFICIAL_SYSTEM = "\nYou are a Verilog RTL designer that only writes code using correct Verilog syntax.\n"
OFFICIAL_RULE = (
    "\nEnclose your code with [BEGIN] and [DONE]. Only output the code snippet\nand do NOT output anything else.\n"
)
FENCED_RULE = "Answer with one block of Verilog that holds the whole TopModule and every module that it uses."
PAPER_RULE = (
    "Call the module TopModule and use the port names as they are given. Declare as reg whatever an always block "
    "assigns. Work on arrays element by element. Write nothing but Verilog, in a fenced block."
)
PROMPTS = ("official", "fenced", "paper")


def ask(specification: str, prompt: str) -> tuple[Message, ...]:
    """The messages of one of PROMPTS, or of a text with {question} in it.

    `official`: a system message, and the specification between `Question:` and `Answer:` with the rule on [BEGIN] and
    [DONE]. `fenced`: with one sentence on the form of the answer, as a chat model's user would write. `paper`: with the
    four hints that arXiv 2605.25645 gave, in our words and without a system turn.
    """
    specification = specification.strip()
    if PLACE in prompt:
        return (text_message("user", prompt.replace(PLACE, specification)),)
    if prompt == "official":
        asked = f"\nQuestion:\n{specification}\n{OFFICIAL_RULE}\nAnswer:\n"
        return text_message("system", OFFICIAL_SYSTEM), text_message("user", asked)
    return (text_message("user", f"{specification}\n\n{FENCED_RULE if prompt == 'fenced' else PAPER_RULE}"),)


def read_questions(folder: Path, *, prompt: str) -> QuestionSet:
    """Every problem of the folder, asked as `prompt` says, as in `ask`. Raises DataError."""
    problems = simulate.read_problems(folder)
    questions = tuple(
        Question(
            messages=ask(problem.prompt, prompt),
            expected=problem.reference,
            origin=problem.name,
            columns={"problem": problem},
        )
        for problem in problems
    )
    return QuestionSet(questions=questions, sha256=simulate.problems_sha256(problems))


def open_judges(questions: Sequence[Question], *, unsafe: bool = False) -> Judges:
    """What judges answers; each reference is run first, as not all can be. Raises MachineError without a simulator."""
    tool, sandbox = simulate.find_simulator(), find_sandbox(unsafe=unsafe)
    benches: dict[str, simulate.Testbench] = {}
    ungraded: dict[str, str] = {}
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        opened = [pool.submit(simulate.open_bench, question.columns["problem"], sandbox) for question in questions]
        for question, each in zip(questions, opened, strict=True):
            try:
                benches[question.origin] = each.result()
            except simulate.Failed as failed:
                ungraded[question.origin] = f"its own reference does not pass: {failed.reason}, {failed}"
    finally:  # also after Ctrl-C: what has not begun need not be waited for
        pool.shutdown(wait=False, cancel_futures=True)

    def score(question: Question, answers: Sequence[str]) -> list[Verdict]:
        """Whether each answer's TopModule does what the reference does, in the problem's own testbench."""
        return [simulate.judge(benches[question.origin], answer, sandbox) for answer in answers]

    return Judges(score=score, ungraded=ungraded, tool=tool, sandboxed=sandbox.bubblewrap is not None)
