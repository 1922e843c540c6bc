"""What a task's module holds: `make_rows` where it makes rows, `COLUMNS` and `score` where it scores answers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gemsmith.messages import Message


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out row: what the model is told, what it should answer, and the other columns that the scorer reads."""

    messages: tuple[Message, ...]
    expected: str
    origin: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether an answer is right, and why not in a few words, where the scorer knows."""

    right: bool
    reason: str | None = None


class RowMaker(Protocol):
    """A task whose rows `data.train` and `data.eval` can ask for."""

    def make_rows(self, rows: int, split: str, seed: int) -> Iterable[Mapping[str, Any]]:
        """`rows` different rows of a split, as a file would hold them; the two splits share none, whatever the seed.

        A row has the columns prompt and response, or messages: the task's prompt is written here and nowhere else. It
        may have others, which the task's scorer names in COLUMNS.
        """


class Scorer(Protocol):
    """A task that `eval.scorer` can name."""

    COLUMNS: tuple[str, ...]
    """Columns that each held-out row must have beside the messages; no others are read."""

    def score(self, question: Question, answers: Sequence[str]) -> Sequence[Verdict]:
        """A verdict for each answer to the question, in order; there may be one answer or many.

        It runs in a thread beside others, never in the event loop, so it may take long and start programs. It bounds
        their time itself: Ctrl-C waits for those that run. An answer that breaks such a program is wrong, and says so
        in the verdict's reason. Raises ScorerError where it cannot judge these answers, and MachineError where it can
        judge none, such as for a program that is not installed.
        """
