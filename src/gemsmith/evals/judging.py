"""What a scorer makes of answers: it may take long, start programs, and fail on one row without ending the others."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from gemsmith.errors import GemsmithError, Preempted, ScorerError
from gemsmith.serve.chat import Failure
from gemsmith.tasks import Judges, Question, Scorer, Verdict

_SHOWN = 300

Judged = Future[tuple[Verdict, ...] | Failure]


@contextlib.contextmanager
def judging(scorer: Scorer | Judges) -> Iterator[Callable[[Question, str], Judged]]:
    """Until the block ends, a function that has an answer to a question judged, beside what else there is to do.

    As many answers are judged at once as there are cores. What has not begun when the block ends is never judged.
    """
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        yield lambda question, answer: pool.submit(judge, scorer, question, (answer,))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def judge(scorer: Scorer | Judges, question: Question, answers: Sequence[str]) -> tuple[Verdict, ...] | Failure:
    """The verdicts on the answers to a question, in order, or why the scorer could not judge them.

    An answer is a text that nobody has read, so whatever a scorer raises over it is a reason that is counted: that of
    its ScorerError, or else the exception's name. Only Gemsmith's other errors, such as MachineError, are raised.
    """
    try:
        verdicts = tuple(scorer.score(question, answers))
    except ScorerError as error:
        return Failure(reason=str(error), detail=str(error))
    except (GemsmithError, Preempted):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a scorer can raise anything over a text that a model wrote
        return Failure(reason=type(error).__name__, detail=" ".join(str(error).split())[:_SHOWN])
    return _refuse_others(verdicts, len(answers)) or verdicts


def _refuse_others(verdicts: tuple[object, ...], answers: int) -> Failure | None:
    """What is wrong with what a scorer of the user's own has returned, if anything is."""
    if len(verdicts) != answers:
        return Failure(reason="wrong count", detail=f"score returned {len(verdicts)} verdicts on {answers} answers")
    for verdict in verdicts:
        if not isinstance(verdict, Verdict):
            detail = f"score returned {verdict!r:.80} in place of a gemsmith.tasks.Verdict"
            return Failure(reason="no verdict", detail=detail)
    return None
