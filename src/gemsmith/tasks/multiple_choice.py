"""The scorer `multiple-choice`: a question is right where the expected answer is the likeliest of the row's choices.

`choices` is a column of the row, a list of texts; the expected answer is one of them. The model writes nothing: each
choice's log-probability after the prompt is asked for, as if the model had begun its answer with it. Raw, the sums are
compared; length-normalized, the sums over the choices' characters, as lm-evaluation-harness does for `acc` and
`acc_norm`. Where another choice is as likely as the expected one, it is not right.
"""

import json
from collections.abc import Mapping, Sequence

from gemsmith.errors import DataError
from gemsmith.tasks.base import Question, Verdict

COLUMNS = ("choices",)
NORMALIZED = "length-normalized"


def check(question: Question) -> None:
    """Raises DataError where the choices are not different texts, or the expected answer is not one of them."""
    choices = question.columns["choices"]
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise DataError(f"{question.origin}: choices is {choices!r:.80}; give a list of texts")
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise DataError(f"{question.origin}: choices must be two or more different texts")
    bad = [choice for choice in choices if not choice or choice != choice.strip()]
    if bad:
        raise DataError(f"{question.origin}: the choice {bad[0]!r} is empty, or has white space at an end; change it")
    if question.expected not in choices:
        why = f"the expected answer {question.expected!r:.80} is none of the choices"
        raise DataError(f"{question.origin}: {why}; it must be one, to the letter")


def list_choices(question: Question) -> Sequence[str]:
    return question.columns["choices"]


def score(question: Question, answers: Sequence[str]) -> list[Verdict]:
    """A verdict for each answer, which is the choices' log-probabilities in JSON; see MultipleChoiceScorer."""
    verdicts = []
    for answer in answers:
        raw = {each["choice"]: each["logprob"] for each in json.loads(answer)}
        normalized = {choice: logprob / len(choice) for choice, logprob in raw.items()}
        likeliest = max(raw, key=lambda choice: raw[choice])
        right = _is_likeliest(question.expected, raw)
        another = f"{likeliest!r} is likelier" if likeliest != question.expected else "another is as likely"
        others = {NORMALIZED: _is_likeliest(question.expected, normalized)}
        verdicts.append(Verdict(right=right, reason=None if right else another, others=others))
    return verdicts


def _is_likeliest(expected: str, logprobs: Mapping[str, float]) -> bool:
    return all(logprobs[expected] > logprob for choice, logprob in logprobs.items() if choice != expected)
