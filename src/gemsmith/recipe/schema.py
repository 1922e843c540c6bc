"""The recipe: one YAML that every stage reads. Its keys and their defaults.

Defaults live here and nowhere else; where arXiv 2605.25645 gives a value, it is that one.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue

from gemsmith.arch import LORA_KINDS
from gemsmith.recipe.backends import ANSWER_TOKENS, OptimizationSwitch, Saved
from gemsmith.recipe.section import AtOnce, InputPath, Listed, RowCount, Says, Section, Steps, T, TokenCount
from gemsmith.recipe.serving import Bench, Serve
from gemsmith.tasks import GENERATORS, SCORERS, SOURCES, describe_tasks

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
SpikeFactor = Annotated[float, Field(gt=1, le=1e6), Says(compiled=False)]
MOST_DEVICES = 16_384  # the largest TPU pods have 9,216 chips
Devices = Annotated[int, Field(gt=0, le=MOST_DEVICES)]
NotCompiled = Annotated[T, Says(compiled=False)]
OfQuestions = Annotated[T, Says("plan data train questions")]
OfRows = Annotated[T, Says("plan data train")]
ErrorOrDrop = Literal["error", "drop"]
if TYPE_CHECKING:
    MadeTask: TypeAlias = str
    ScorerName: TypeAlias = str
    TaskName: TypeAlias = str
    RowFormat: TypeAlias = str
    RowColumn: TypeAlias = str
else:  # the names of the tasks that there are, or a Python file of the user's own
    _OwnFile = Annotated[str, Field(pattern=r"\.py$")]
    MadeTask, ScorerName = Literal[tuple(GENERATORS)] | _OwnFile, Literal[tuple(SCORERS)] | _OwnFile
    TaskName = Literal[(*SOURCES, *SCORERS)] | _OwnFile
    _FORMS = "messages prompt-response prompt-completion alpaca sharegpt question-answer text image-folder"
    _COLUMNS = "messages prompt response completion instruction input output system conversations question answer text"
    RowFormat, RowColumn = Literal[("auto", *_FORMS.split())], Literal[(*_COLUMNS.split(), "image", "images", "tools")]
TASK_KEYS = ("data.train.task", "data.eval.task", "eval.scorer")
"""Keys that may name such a file, beside the entries of eval.tasks."""
# YAML 1.1 takes a bare off for false.
AutoOrOff = Annotated[OptimizationSwitch, BeforeValidator(lambda value: "off" if value is False else value)]


class GeneratedData(Section):
    """Rows made by a seeded generator, instead of a file."""

    task: MadeTask = Field(
        description=f"The generator: {describe_tasks(GENERATORS)}; or your own Python file with generate_rows, whose "
        "code is run."
    )
    rows: RowCount = Field(description="How many rows to make.")
    split: Literal["train", "held-out"] = Field("train", description="The two splits share no specification.")


class RowSource(Section):
    """One of several sources of rows."""

    path: str = Field(description="A file, a folder or an address of rows.")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0, description="How often an epoch takes each of its rows; of a fraction, the seed draws which."
    )


Rows: TypeAlias = str | GeneratedData | Annotated[Listed[RowSource], Field(min_length=1)]


class Data(Section):
    stages = "plan data train"

    train: InputPath[Rows] = Field(
        description="A JSONL, JSON, CSV or parquet file, a dataset folder, https:// or gs:// of a file, "
        "hub:user/name@commit:split, rows to make, or several, each {path, weight}."
    )
    eval: Annotated[Rows | None, Says("plan questions held_out", path=True)] = Field(
        None, description="Held-out rows, in the same forms, or a share of data.train: 5%; null: no evaluation."
    )
    format: OfQuestions[RowFormat] = Field(
        "auto", description="`auto` looks at the columns; image-folder: a sub-folder of images for each class."
    )
    columns: OfQuestions[dict[RowColumn, str]] = Field(
        {}, description="What the rows call a form's columns, such as {prompt: task, response: solution}."
    )
    labels: OfQuestions[dict[str, str]] = Field(
        {}, description="image-folder: sub-folder -> answer; default: its name, _ as spaces."
    )
    prompt: OfQuestions[str | None] = Field(
        None, description="image-folder: the text after each image; {labels}: all answers."
    )
    held_out: OfQuestions[Fraction] = Field(
        0.0, description="The share of data.train that is data.eval, of a folder of images that of each class."
    )
    image_tokens: OfQuestions[Literal[70, 140, 280, 560, 1120]] = Field(
        280, description="Soft tokens of an image at most."
    )
    max_patches: Annotated[int, Field(gt=0, le=9 * 2**20)] = Field(
        25_200, description="Of a row's images, at most; 280 soft tokens are 2,520 patches."
    )
    on_bad_image: ErrorOrDrop = Field("error", description="What happens to a row whose image is unusable.")
    on_bad_row: ErrorOrDrop = Field("error", description="What happens to a row that cannot be read or rendered.")
    template: InputPath[str | None] = Field(None, description="A chat template file; default: the checkpoint's own.")
    thinking: Annotated[bool, Says("plan data train serve bench eval")] = Field(
        False, description="Ask for reasoning before answers: the chat template's enable_thinking, wherever it renders."
    )
    control_tokens: OfQuestions[Literal["error", "drop", "text"]] = Field(
        "error", description="Of Gemma 4's control tokens in a row's texts; `text`: they are read as plain characters."
    )
    max_length: TokenCount = Field(4096, description="Tokens in a row, packed or not.")
    packing: bool = Field(
        True, description="Several documents in a row, kept apart by segments; never a document over two rows."
    )
    on_too_long: ErrorOrDrop = Field("drop", description="What happens to a document longer than max_length.")
    limit: RowCount | None = Field(None, description="Train on so many rows at most, drawn by the seed; null: on all.")

    @property
    def sources(self) -> tuple[str, ...]:
        """The files, folders and addresses that data.train names; none where its rows are made."""
        return sources_of(self.train)


def sources_of(rows: Rows | None) -> tuple[str, ...]:
    """The files, folders and addresses that data.train or data.eval names."""
    return (rows,) if isinstance(rows, str) else tuple(one.path for one in rows or () if isinstance(one, RowSource))


def lora_scale(*, rank: int, alpha: float, rslora: bool) -> float:
    """What B A is multiplied by; rsLoRA: https://arxiv.org/abs/2312.03732.

    >>> lora_scale(rank=16, alpha=32.0, rslora=False), lora_scale(rank=16, alpha=32.0, rslora=True)
    (2.0, 8.0)
    """
    return alpha / (math.sqrt(rank) if rslora else rank)


class Lora(Section):
    stages = "plan train"

    rank: Annotated[int, Field(gt=0, lt=2**31)] = Field(64, description="R: the columns of A and the rows of B.")
    alpha: Annotated[float, Field(ge=1e-6, le=1e5)] = Field(
        64.0, description="Adapters are scaled by alpha / rank, with rslora by alpha / sqrt(rank)."
    )
    dropout: Fraction = Field(
        0.05, description="The share of an adapter's inputs that a training step leaves out; 0: none."
    )
    rslora: bool = Field(False, description="Scale adapters by alpha / sqrt(rank) instead of alpha / rank.")
    targets: Listed[str] = Field(
        LORA_KINDS, description="Kinds of projection; vision: the tower's; all-linear: PEFT's, with trl."
    )

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return lora_scale(rank=self.rank, alpha=self.alpha, rslora=self.rslora)


class Optimizer(Section):
    stages = "train"

    learning_rate: Annotated[float, Field(ge=1e-12, le=1)] = Field(
        1e-4, description="The highest rate, at the end of the warm-up. Default where train.method is full: 1e-5."
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="After warm-up; cosine and linear end at 0."
    )
    warmup_steps: Annotated[int, Field(ge=0, le=10_000_000)] | None = Field(
        None, description="Default, where there is no warmup_ratio: a tenth of all updates, rounded down, at most 100."
    )
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Instead of warmup_steps: their share of all updates, rounded up."
    )
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(
        0.001, description="AdamW's: an update also takes this share of the matrices, times the learning rate."
    )
    max_grad_norm: Annotated[float, Field(ge=1e-6, le=1e6)] | None = Field(
        1.0, description="Global gradient norm; null: no clipping."
    )
    beta1: Fraction = Field(0.9, description="AdamW's: how much of the gradients' mean a step keeps.")
    beta2: Fraction = Field(0.999, description="AdamW's: how much of the squared gradients' mean a step keeps.")
    epsilon: Annotated[float, Field(ge=1e-30, le=1)] = Field(
        1e-8, description="AdamW's: added to the root that an update is divided by."
    )

    def warmup(self, updates: int) -> int:
        """The steps of warm-up, of so many updates.

        >>> [Optimizer().warmup(updates) for updates in (9, 19, 5000)]
        [0, 1, 100]
        """
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * updates)
        # Rounded down, since the first step of a warm-up has the rate 0: of a few steps none is to be lost.
        return min(100, updates // 10) if self.warmup_steps is None else self.warmup_steps


class Mesh(Section):
    replica: Devices = Field(1, description="Copies of the weights; each takes its share of the rows.")
    fsdp: Devices = Field(1, description="Splits rows, and the weights by the model's width.")
    sequence: Devices = Field(1, description="Splits every row's positions, and the weights like fsdp.")
    tp: Devices = Field(1, description="Splits heads, hidden units and the vocabulary.")


class Train(Section):
    stages = "plan train"

    method: Literal["lora", "full"] = Field(
        "lora", description="What is trained: adapters, or with `full` the text model's own weights, in float32."
    )
    backend: Literal["tunix", "trl"] = Field("tunix", description="JAX on TPU, GPU or CPU; or TRL on GPU.")
    init_adapter: Annotated[str | None, Says(path=True, compiled=False)] = Field(
        None, description="A folder of a PEFT adapter whose matrices training starts from."
    )
    epochs: NotCompiled[OfRows[Annotated[int, Field(gt=0, le=10_000)]]] = Field(
        1, description="How often all rows are trained on."
    )
    max_steps: NotCompiled[OfRows[Steps | None]] = Field(
        None,
        description="Updates; rows repeat in further epochs where there are fewer than they need. Default: epochs "
        "decide.",
    )
    global_batch_size: OfRows[Annotated[int, Field(gt=0, le=2**20)]] = Field(
        8, description="Rows of max_length in one optimizer step, over all devices."
    )
    tokens_per_step: NotCompiled[Annotated[int, Field(gt=0, le=2**28)] | None] = Field(
        None, description="Instead of global_batch_size: positions in one step, padding counted."
    )
    gradient_accumulation_steps: Annotated[int, Field(gt=0, le=2**20)] = Field(
        1,
        description="Parts of a step, run one after the other for less memory; the update is the same. JAX on CPU "
        "takes row by row.",
    )
    attention: Literal["auto", "splash", "dense", "documents", "sdpa", "eager"] = Field(
        "auto",
        description="tunix: the `splash` kernel on TPU, for heads of whole 128s; `dense` blocks elsewhere. trl: "
        "`documents` one by one, or masked `sdpa`, `eager`.",
    )
    remat: Literal["auto", "none", "layer"] | Listed[Saved] = Field(
        "auto",
        description="What the backward pass recomputes: `none`, a whole `layer`, or all of it but the results "
        "named here; `auto` names as many as the device has room for.",
    )
    offload: Listed[Saved] = Field(
        (), description="Results of a layer that wait for the backward pass in the host's memory; TPU and GPU."
    )
    mesh: Literal["auto"] | Mesh = Field(
        "auto", description="How devices share a step; `auto` splits rows first, then their positions."
    )
    dtype: Literal["bfloat16", "float32", "nf4", "int8"] = Field(
        "bfloat16",
        description="Of the frozen base, `nf4` and `int8` computing in bfloat16; what is trained is float32.",
    )
    double_quant: NotCompiled[bool] = Field(False, description="trl, nf4: the scales are rounded to 8 bits, too.")
    compile: NotCompiled[bool] = Field(
        False, description="trl: fuses what lies between matmuls, with torch.compile; tunix always compiles."
    )
    compiler_options: dict[str, bool | int | float | str | None] = Field(
        {},
        description="tunix: XLA's flags by name, over those that Gemsmith sets (gemsmith.train.jax.compile); null "
        "takes one of Gemsmith's away.",
    )
    optimizations: AutoOrOff = Field(
        "auto",
        description="tunix: `off` trains without anything whose gain is estimated and not yet measured on a TPU: "
        "Gemsmith's XLA flags, the fused LoRA matmul, the kernel for heads, QK-norm and RoPE, layers chained and "
        "recomputed in turn, barriers around matmuls, the split vocabulary. The update is the same, but for rounding.",
    )
    eval_steps: NotCompiled[OfRows[Steps | None]] = Field(
        None, description="Steps from one loss on the rows of data.eval to the next; the last has one, too. null: none."
    )
    keep: NotCompiled[Literal["last", "best"]] = Field(
        "last", description="The step that export takes; best: of the lowest of the losses of eval_steps, always saved."
    )
    early_stopping_patience: NotCompiled[Steps | None] = Field(
        None, description="Ends after so many losses of eval_steps in a row that are not below the lowest; null: never."
    )
    sample_answers: Annotated[int, Says("trackers", compiled=False), Field(ge=0, le=16)] = Field(
        0,
        description="So many prompts of data.eval that the model answers at each of eval_steps, in up to "
        f"{ANSWER_TOKENS} tokens.",
    )
    report_to: Annotated[
        Listed[Literal["tensorboard", "wandb", "mlflow", "trackio"]], Says("trackers", compiled=False)
    ] = Field(
        ("tensorboard",), description="Where the numbers of steps and evaluations go, too; may change on the way."
    )
    save_steps: NotCompiled[Steps] = Field(100, description="Steps.")
    save_total_limit: NotCompiled[Steps] = Field(
        3, description="How many saved steps stay: the newest, and beside them the best, where that is to keep."
    )
    checkpoint_folder: NotCompiled[str | None] = Field(
        None, description="A folder or gs://bucket/folder for the checkpoints; null: in the run directory."
    )
    on_nonfinite: NotCompiled[Literal["stop", "skip"]] = Field(
        "stop", description="What a step does whose loss or gradient is NaN or infinite; skip: its update is left out."
    )
    spike_factor: SpikeFactor = Field(
        3.0, description="A loss of more than this many times the median of the last 50 steps is a spike."
    )
    grad_norm_spike_factor: SpikeFactor = Field(10.0, description="The same of a gradient norm before clipping.")
    on_spike: NotCompiled[Literal["report", "stop", "skip"]] = Field(
        "report", description="What a step does whose loss or gradient norm is a spike."
    )


class Export(Section):
    stages = "export"

    step: Steps | None = Field(None, description="The saved step to export; default: by train.keep.")
    merge_into: Literal["trained", "original"] = Field(
        "trained", description="nf4 and int8: the dequantized weights that were `trained` on, or the `original` ones."
    )


class EvalTask(Section):
    """One of several things that a run is scored on."""

    task: TaskName = Field(
        description=f"A scorer, for the held-out rows of data.eval; or a task with its own questions: "
        f"{describe_tasks(SOURCES)}."
    )
    dataset: str | None = Field(None, description="The folder with the questions of such a task.")
    prompt: str | None = Field(
        None,
        description="How such a task asks. verilog: `official` (default), as verilog-eval does, `fenced` or `paper`; "
        "or a .txt file of your own, with {question} where a question stands.",
    )
    samples: Annotated[int, Field(gt=0, le=10_000)] | None = Field(
        None, description="Answers to each question; default: the task's, verilog's is 5."
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="Default: the task's, verilog's is 0.8."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Default: the task's, verilog's is 0.95."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = Field(
        None, description="What each sample's own seed follows from; default: the recipe's seed."
    )
    max_tokens: TokenCount | None = Field(None, description="The longest answer; default: eval.max_tokens.")
    unsafe: bool = Field(False, description="Run generated code without a sandbox, with your rights.")


class Eval(Section):
    stages = "eval"

    tasks: Listed[EvalTask] = Field((), description="What is scored; default: the held-out rows, by eval.scorer.")
    scorer: ScorerName = Field(
        "exact",
        description=f"What an answer is judged by: {describe_tasks(SCORERS)}; or your own Python file with COLUMNS and "
        "score, whose code is run.",
    )
    options: dict[str, JsonValue] = Field(
        {}, description="Values of the scorer's columns, such as `pattern`, for the rows that have none of their own."
    )
    max_tokens: TokenCount = Field(512, description="Tokens of the longest answer.")
    limit: RowCount | None = Field(None, description="Score so many rows or questions, drawn; of lm-eval's the first.")
    limit_seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="Which ones eval.limit draws.")
    concurrency: AtOnce = Field(16, description="Requests under way at once.")


class Hardware(Section):
    stages = "plan"

    machines: Listed[str] = Field(
        ("v5p-8", "v6e-8", "2xh100"), min_length=1, description="Machines to plan for, of the catalog."
    )
    catalog: InputPath[str | None] = Field(None, description="A YAML that replaces or adds to the shipped catalog.")


class Recipe(Section):
    """Everything a run needs to know."""

    model: Annotated[str | None, Says("plan train")] = Field(
        None, description="gemma4-e2b, -e4b, -12b, -26b-a4b, -31b, a tiny one; default: what the checkpoint is."
    )
    checkpoint: Annotated[str, Says("plan data train", path=True)] = Field(
        description="A folder, a Hugging Face hub id, or gs://bucket/folder."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32), Says("data train bench eval")] = Field(
        0, description="Of rows that are made, their order, A's first values and dropout."
    )
    data: Data
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    export: Export = Export()
    serve: Serve = Serve()
    bench: Bench = Bench()
    eval: Eval = Eval()
    hardware: Hardware = Hardware()

    @classmethod
    def load(cls, path: Path | str) -> "Recipe":
        """The recipe in a YAML file, every key checked. Raises RecipeError for what cannot be used, in one line."""
        from gemsmith.recipe.load import load_recipe

        return load_recipe(path)

    def override(self, values: Mapping[str, Any]) -> "Recipe":
        """A new recipe with these values, by dotted key: `{"lora.rank": 8}`. Raises RecipeError, as load does."""
        from gemsmith.recipe.load import build_recipe

        texts = [f"{key}={json.dumps(value, default=str, ensure_ascii=False)}" for key, value in values.items()]
        return build_recipe(self.model_dump(mode="json", exclude_unset=True), texts)


class ResolvedValue(NamedTuple):
    """A value that the user did not write, and why it is what it is."""

    key: str
    value: Any
    reason: str

    @property
    def plain_value(self) -> Any:
        """As JSON and YAML have it."""
        if not isinstance(self.value, tuple):
            return self.value
        return [item.model_dump(mode="json") if isinstance(item, Section) else item for item in self.value]


def eval_tasks(recipe: Recipe) -> tuple[EvalTask, ...]:
    """What the run is scored on: eval.tasks, or else eval.scorer on the held-out rows, where data.eval names any."""
    if recipe.eval.tasks or recipe.data.eval is None:
        return recipe.eval.tasks
    return (EvalTask(task=recipe.eval.scorer),)


def longest_answer(recipe: Recipe) -> int:
    """The most tokens that eval asks for in one answer; 0 where there is no eval."""
    return max((task.max_tokens or recipe.eval.max_tokens for task in eval_tasks(recipe)), default=0)
