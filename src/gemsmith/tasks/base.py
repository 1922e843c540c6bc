"""What a task's module holds.

`generate_rows` makes rows, `COLUMNS` and `score` score answers, `read_questions` and `open_judges` bring questions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from gemsmith.tasks.messages import Message

if TYPE_CHECKING:  # it loads Pillow, which a recipe does not need
    from gemsmith.images.check import ImageInfo

PLACE = "{question}"  # of what is asked, in the text of a prompt of the user's own


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out row: what the model is told, what it should answer, and the other columns that the scorer reads."""

    messages: tuple[Message, ...]
    expected: str
    origin: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    images: "tuple[ImageInfo, ...]" = ()  # what was found of the messages' images, in order
    tools: Sequence[Mapping[str, Any]] = ()  # the functions that the model is told it may call


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether an answer is right, and why not in a few words, where the scorer knows."""

    right: bool
    reason: str | None = None  # in a few words, by which verdicts are counted
    detail: str = ""  # what more there is to say of this one
    others: Mapping[str, bool] = field(default_factory=dict)
    """Whether it is right by other measures of the same scorer, such as `length-normalized`; shown beside the score."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn, and how many to each question."""

    samples: int
    temperature: float
    top_p: float


GREEDY = Sampling(samples=1, temperature=0.0, top_p=1.0)


@dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """A task's own questions, each with another name as `origin`, and a digest of all that they were read from."""

    questions: tuple[Question, ...]
    sha256: str


class DataGenerator(Protocol):
    """A task whose rows `data.train` and `data.eval` can ask for."""

    def generate_rows(self, rows: int, split: str, seed: int) -> Iterable[Mapping[str, Any]]:
        """`rows` different rows of a split, as a file would hold them; the two splits share none, whatever the seed.

        A row has the columns prompt and response, or messages: the task's prompt is written here and nowhere else. It
        may have others, which the task's scorer names in COLUMNS.
        """


class Scorer(Protocol):
    """A task that `eval.scorer` can name. It may also be one or more of the four below."""

    COLUMNS: tuple[str, ...]
    """Columns that each held-out row must have beside the messages, or `eval.options` gives. No others are read."""

    def score(self, question: Question, answers: Sequence[str]) -> Sequence[Verdict]:
        """A verdict for each answer to the question, in order; there may be one answer or many.

        It runs in a thread beside others, never in the event loop, so it may take long and start programs. It bounds
        their time itself: Ctrl-C waits for those that run. An answer that breaks such a program is wrong, and says so
        in the verdict's reason. Raises ScorerError where it cannot judge these answers, and MachineError where it can
        judge none, such as for a program that is not installed.
        """


@runtime_checkable
class SupportsOptions(Protocol):
    """A scorer that reads further columns where they are given."""

    OPTIONAL_COLUMNS: tuple[str, ...]  # as COLUMNS, but a row that has none is no error


@runtime_checkable
class SupportsValidation(Protocol):
    """A scorer that looks at every row before any model is asked."""

    def check(self, question: Question) -> None:
        """Raises DataError, naming the question's origin, where the row cannot be scored by."""


@runtime_checkable
class MultipleChoiceScorer(Protocol):
    """A scorer that asks how likely given answers are, instead of what the model writes.

    What `score` gets as an answer is then a JSON list in the choices' order, such as
    `[{"choice": "yes", "logprob": -1.2, "tokens": 1}, …]`: the log-probability of the choice's tokens after the prompt.
    """

    def list_choices(self, question: Question) -> Sequence[str]:
        """The texts to ask for; none begins with white space, which would merge with the end of the prompt."""


@runtime_checkable
class Classifier(Protocol):
    """A scorer whose answers are labels, so that it can be told which are taken for which."""

    def list_labels(self, questions: Sequence[Question]) -> Sequence[str]:
        """All labels, each once; the expected answers are among them."""

    def find_label(self, answer: str, labels: Sequence[str]) -> str | None:
        """Which of the labels an answer is; None where it is none."""


@dataclass(frozen=True, kw_only=True)
class Judges:
    """What judges answers to a task's own questions, once it has looked at what it needs for that."""

    score: Callable[[Question, Sequence[str]], Sequence[Verdict]]  # see Scorer
    ungraded: Mapping[str, str]
    """Questions that no answer can be judged for here, by origin, and why: they are not asked."""
    tool: str  # what judges, with its version
    sandboxed: bool  # whether what answers hold runs where it can do no harm


class Benchmark(Protocol):
    """A task that `eval.tasks` can name with a `dataset`: it brings its own questions."""

    SAMPLING: Sampling  # where the recipe does not say
    PROMPTS: tuple[str, ...]  # the ways to ask that `prompt` can name; the first is the default

    def read_questions(self, folder: Path, *, prompt: str) -> QuestionSet:
        """The questions in a folder, asked in one of PROMPTS, or in a text with PLACE in it. Raises DataError."""

    def open_judges(self, questions: Sequence[Question], *, unsafe: bool = False) -> Judges:
        """What judges answers to these questions, `unsafe` without a sandbox. Raises MachineError without a program."""
