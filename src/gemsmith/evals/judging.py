"""What a scorer makes of answers: it may take long, start programs, and fail on one row without ending the others."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gemsmith.errors import GemsmithError, ScorerError
from gemsmith.serve.chat import Failure
from gemsmith.tasks import Question, Scorer, Verdict
from gemsmith.terminal import open_console, track

_SHOWN = 300


def judge_all(scorer: Scorer, rows: Sequence[tuple[Question, Sequence[str]]]) -> list[tuple[Verdict, ...] | Failure]:
    """For each question and its answers their verdicts, or why there are none; as many rows at once as there are cores.

    Raises whatever judge raises, for the first such row.
    """
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        waiting = [pool.submit(judge, scorer, question, answers) for question, answers in rows]
        return [judged.result() for judged in track(waiting, "scoring", open_console())]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def judge(scorer: Scorer, question: Question, answers: Sequence[str]) -> tuple[Verdict, ...] | Failure:
    """The verdicts on the answers to a question, in order, or why the scorer could not judge them.

    An answer is a text that nobody has read, so whatever a scorer raises over it is a reason that is counted: that of
    its ScorerError, or else the exception's name. Only Gemsmith's other errors, such as MachineError, are raised.
    """
    try:
        verdicts = tuple(scorer.score(question, answers))
    except ScorerError as error:
        return Failure(reason=str(error), detail=str(error))
    except GemsmithError:
        raise
    except Exception as error:  # noqa: BLE001 - a scorer can raise anything over a text that a model wrote
        return Failure(reason=type(error).__name__, detail=" ".join(str(error).split())[:_SHOWN])
    assert len(verdicts) == len(answers), f"{len(verdicts)} verdicts on {len(answers)} answers"
    return verdicts
