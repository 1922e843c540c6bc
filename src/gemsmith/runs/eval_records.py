"""What the stage eval and other scoring write; see gemsmith.runs.records."""

from typing import Any, ClassVar

from pydantic import Field

from gemsmith.runs.records import SCHEMA_VERSION, Computer, Part, Record, ServerFacts


class Share(Part):
    score: float
    low: float  # 95 % interval: Wilson's, or over questions where each has several answers
    high: float


class Score(Share):
    """The share of right answers: with several to a question, pass@1."""

    n: int  # rows, or questions
    cut: int = 0  # answers that reached eval.max_tokens before they had ended
    failed: dict[str, int] = Field(default_factory=dict)
    """Requests that were not answered, by reason, such as `http 500`; each counts as not right."""
    ungraded: dict[str, int] = Field(default_factory=dict)
    """Answers that the scorer could not judge, by reason; each counts as not right."""
    others: dict[str, Share] = Field(default_factory=dict)
    """The scorer's other measures of the same answers, such as `length-normalized`."""


class LmEvalScore(Part):
    value: float
    stderr: float | None  # as lm-evaluation-harness gives it; None where it gives none


class LmEvalRecord(Record):
    """Scores of lm-evaluation-harness; beside the stage eval, and not needed by any other."""

    stage: ClassVar[str] = "lm_eval"
    lm_eval: str  # its version
    tasks: tuple[str, ...]
    limit: int | None
    rows: dict[str, int]  # task -> rows that were scored
    base: dict[str, dict[str, LmEvalScore]]  # task -> metric -> score
    tuned: dict[str, dict[str, LmEvalScore]]


class ProblemScore(Part):
    name: str
    samples: int
    passed: int
    reasons: dict[str, int]
    """Of the samples that did not pass, by why: no module, compile error, wrong output, timeout, forged, sandbox."""
    details: tuple[str, ...] = ()  # what was said of them, each once
    ungraded: str | None = None  # why no answer to it can be judged here: the problem does not count


class PassAt(Share):
    """pass@k: how likely at least one of k answers is right, with a 95 % interval over problems."""

    k: int


class ModelResult(Part):
    """One model's answers to a task."""

    score: Score
    pass_at: tuple[PassAt, ...] = ()
    problems: tuple[ProblemScore, ...] = ()  # where questions have names of their own
    answers: int  # how many were asked for
    mean_output_tokens: float | None = None
    """Over the answers whose server said how many tokens it wrote; None where it never did."""
    usage_missing: int = 0  # answers whose server did not say
    retries: dict[str, int] = Field(default_factory=dict)
    """Requests that were sent again, by reason; `server died` counts its starts."""
    prompts_compared: int = 0
    """Prompts with images that the server was seen to read as the ids that training makes of them."""


class Difference(Part):
    """The tuned model's score less the base's, question by question, with a 95 % interval over questions."""

    mean: float
    low: float
    high: float  # of a paired bootstrap
    p_value: float
    """Of a sign-flip test, of a mean at least as far from 0 by chance alone; of rows right or wrong McNemar's."""
    significant: bool
    questions: int
    better: int
    worse: int
    sample_size_for_2pp: int | None
    """How many it would take to tell a difference of 0.02, four times in five; None where no question differs."""
    summary: str


class Interval(Part):
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


class LabelCount(Part):
    expected: str
    answered: str | None  # None: what was written is no label
    rows: int


class LabelScores(Part):
    """How one model classifies, beside its accuracy, which is its score."""

    macro_f1: Interval  # of a bootstrap over rows
    unknown: Interval
    """The share of answers that are no label, with Wilson's interval; an answer that did not come is one."""
    confusion: tuple[LabelCount, ...]  # what there was at least one row of, in the order of the labels


class LabelRow(Part):
    """A row that a model gets wrong."""

    row: int
    origin: str
    expected: str
    base: str
    tuned: str
    base_right: bool
    tuned_right: bool
    images: tuple[str, ...] = ()  # thumbnails as data: URLs; none where the files were gone by then


class LabelsResult(Part):
    labels: tuple[str, ...]
    rows: dict[str, int]  # label -> held-out rows that expect it
    base: LabelScores
    tuned: LabelScores
    macro_f1_difference: Interval  # tuned less base; of a paired bootstrap over rows
    most_confused: tuple[LabelRow, ...]
    """Those that the tuned model gets wrong, its commonest confusions first; then those that the base does."""


class AskedTask(Part):
    """A task's questions and how they are asked, the same for base and tuned."""

    task: str
    samples: int
    temperature: float
    top_p: float
    seed: int  # what each sample's own seed follows from, where the temperature is not 0
    max_tokens: int
    prompt: str | None = None
    dataset: str | None = None
    questions_sha256: str
    drawn_from: int | None = None  # how many questions there are, where eval.limit drew some of them
    limit_seed: int | None = None  # what it drew them by
    left_out: dict[str, str] = Field(default_factory=dict)
    """Questions that no answer can be judged for here, which were not asked and do not count, and why."""
    judged_by: str | None = None
    sandbox: bool | None = None  # whether generated code ran in one; None where none runs


class TaskResult(AskedTask):
    """One task of an evaluation."""

    base: ModelResult
    tuned: ModelResult
    difference: Difference
    labels: LabelsResult | None = None  # where answers are labels


class Elsewhere(Part):
    """A server that somebody else runs, by what it says of itself; Gemsmith cannot check its weights."""

    url: str
    model: str
    root: str | None  # what it says its weights are


class EvalRecord(Record):
    stage: ClassVar[str] = "eval"
    scorer: str
    ignored_columns: dict[str, int] = Field(default_factory=dict)  # of the held-out rows, as in the data record
    base: Score  # of the first task, as `scorer` and whatever else is not in `tasks`
    tuned: Score
    examples: tuple[dict[str, Any], ...]
    """A few rows: prompt, expected, base, tuned, and the images as small data: URLs."""
    held_out_also_trained: int | None = None
    """Scored rows whose prompt is also trained on; None where the prepared data does not tell."""
    tasks: tuple[TaskResult, ...]  # all tasks, in the recipe's order
    server: ServerFacts | None = None
    """Of the base model; the tuned one's has the same settings. None where it ran elsewhere."""
    elsewhere: dict[str, Elsewhere] = Field(default_factory=dict)
    """Base or tuned -> the server that answered for it, where Gemsmith has not started it."""


class AnswersRecord(Part):
    """Answers that existed already, scored; no stage of a run."""

    schema_version: int = SCHEMA_VERSION
    task: str
    dataset: str
    dataset_sha256: str
    answers: str
    answers_sha256: str
    simulator: str
    sandbox: bool
    problems: tuple[ProblemScore, ...]
    left_out: int = 0  # problems with answers that can be judged none of here (`ungraded` says why), which do not count
    unanswered: int  # problems of the dataset without an answer, which do not count
    pass_at: tuple[PassAt, ...]


class Shard(Part):
    """Part `number`, from 1 on, of so many runs of rows whose lengths differ by one at most."""

    number: int
    of: int

    def slice(self, rows: int) -> slice:
        """Its rows, of so many.

        >>> [Shard(number=number, of=3).slice(10) for number in (1, 2, 3)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
        """
        return slice((self.number - 1) * rows // self.of, self.number * rows // self.of)


class PredictRecord(Part):
    """Answers to rows of a user's own, of `gemsmith predict`; no stage of a run."""

    schema_version: int = SCHEMA_VERSION
    started: str  # UTC, ISO 8601
    gemsmith: str
    machine: Computer
    model: str
    weights_sha256: str  # of the model's weights; of a server's, of what it says of them
    rows: int
    rows_sha256: str
    shard: Shard | None = None  # which part of the rows these are; None: all
    sampling: dict[str, Any]
    failed: dict[str, int]  # rows without an answer, by reason
    cut: int  # answers that reached the limit of tokens before they had ended
    asked: int  # answers that this start asked for: the others were kept by earlier ones, or are those of equal rows
    asked_s: float  # from the first request to the last answer; of shards that were joined, the sum
    asked_tokens: int | None  # tokens of those answers, where the server says so
    retries: dict[str, int]  # requests that were sent again, by reason
    warnings: tuple[str, ...] = ()
