"""A task of one's own: rows about temperatures, and a scorer that accepts an answer within a tolerance.

Named in a recipe, relative to it; its code is then run:

    data:
      train: {task: temperature.py, rows: 500}
      eval: {task: temperature.py, rows: 100, split: held-out}
    eval:
      scorer: temperature.py
      options: {tolerance: 0.5}
"""

import random
import re

from gemsmith.errors import DataError
from gemsmith.tasks import Verdict

COLUMNS = ("tolerance",)  # what score reads beside prompt and response: of the row, or else of eval.options


def generate_rows(rows, split, seed):
    """`rows` different rows; the splits share none: the one has the even temperatures, the other the odd ones."""
    first = 0 if split == "train" else 1
    for celsius in random.Random(seed).sample(range(first, 10_000, 2), rows):
        yield {"prompt": f"What is {celsius} °C in °F?", "response": f"{celsius * 9 / 5 + 32:.1f}"}


def check(question):
    """Optional: refuses a row before any model is asked."""
    if not isinstance(question.columns["tolerance"], int | float):
        raise DataError(f"{question.origin}: tolerance must be a number of degrees")


def score(question, answers):
    """A verdict for each answer; what it raises is counted as an answer that could not be judged."""
    verdicts = []
    for answer in answers:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
        if not numbers:
            verdicts.append(Verdict(right=False, reason="no number"))
            continue
        off = abs(float(numbers[-1]) - float(question.expected))
        verdicts.append(Verdict(right=off <= question.columns["tolerance"]))
    return verdicts
