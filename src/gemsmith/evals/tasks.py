"""The tasks of a run, opened: their questions, how each is asked and what judges the answers."""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np

from gemsmith.checkpoints.folder import fetch_folder, patching_of
from gemsmith.data.dataset import Dataset, describe_columns, has_tools, read_held_out, refuse_tools
from gemsmith.data.documents import Document
from gemsmith.data.images import validate_images
from gemsmith.data.workers import check_prompts_in_process, written_answers_in_process
from gemsmith.errors import DataError, MachineError, RecipeError, some
from gemsmith.images.patches import PatchConfig
from gemsmith.recipe.schema import Eval, EvalTask, eval_tasks
from gemsmith.runs.eval_records import AskedTask
from gemsmith.runs.run import Run
from gemsmith.system.console import open_console
from gemsmith.system.files import regular_file
from gemsmith.tasks import SOURCES, find_scorer, find_source, is_prompt_file, source_questions
from gemsmith.tasks.base import (
    GREEDY,
    PLACE,
    Judges,
    MultipleChoiceScorer,
    Question,
    Scorer,
    SupportsValidation,
)
from gemsmith.tasks.messages import BREAK, are_broken, images_of, plain_messages, text_message, text_of

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class OpenTask:
    """A task that is ready to be asked."""

    name: str
    asked: AskedTask  # what its record says of it
    questions: tuple[Question, ...]
    scorer: Scorer | Judges
    patching: PatchConfig | None = None  # how the model cuts up the questions' images; None where they have none
    prompts: tuple[np.ndarray, ...] = ()
    """Of held-out rows, the ids that training makes of each question, int32 of shape (L,)."""

    @property
    def held_out(self) -> bool:
        """Whether its questions are rows of data.eval, and not its own."""
        return self.asked.task not in SOURCES

    def label(self, role: str) -> str:
        """What a model's answers to it are called on the terminal: tuned, or verilog: tuned."""
        return role if self.held_out else f"{self.name}: {role}"

    def question_of(self, number: int) -> Question:
        """What the answer of this index answers: question times samples, plus sample."""
        return self.questions[number // self.asked.samples]


def open_tasks(run: Run, *, elsewhere: Collection[str] = ()) -> tuple[list[OpenTask], Dataset | None]:
    """The run's tasks in the recipe's order, and the held-out rows where one of them reads these.

    What can be known to fail does so here, before a server starts: raises RecipeError, DataError, MachineError.
    `elsewhere`: which of base and tuned answer at servers that render the prompts and resize the images themselves;
    where both do, no checkpoint is needed here.
    """
    recipe = run.recipe
    entries = eval_tasks(recipe)
    if not entries:
        _refuse_no_rows()
    dataset, total, rows, both = None, 0, list[Question](), len(elsewhere) == 2
    if any(entry.task not in SOURCES for entry in entries):
        dataset, total = _read_rows(run, elsewhere=both)
        if dataset.ignored_columns:
            open_console().print(f"eval: ignored the columns {describe_columns(dataset.ignored_columns)}")
        rows = _questions_of(dataset.documents, entries, tools=not (elsewhere or recipe.data.thinking))
        rows = _with_calls(run, dataset.documents, rows)
    names = [entry.task for entry in entries]
    patching = None if both or not any(row.images for row in rows) else _patching_of(run)
    of_rows = partial(
        AskedTask,
        **asdict(GREEDY),
        seed=recipe.seed,
        questions_sha256=_hash_questions(rows),
        **_drawn_fields(len(rows), total, recipe.eval),
    )
    tasks: list[OpenTask] = []
    for place, entry in enumerate(entries):
        name = entry.task if names.count(entry.task) == 1 else f"{entry.task} {names[: place + 1].count(entry.task)}"
        if entry.task in SOURCES:
            tasks.append(_open_source(run, entry, name))
        else:
            most = entry.max_tokens or recipe.eval.max_tokens
            how = of_rows(task=entry.task, dataset=entry.dataset, max_tokens=most)
            scorer = find_scorer(entry.task)
            tasks.append(OpenTask(name=name, asked=how, questions=tuple(rows), scorer=scorer, patching=patching))
    if both:
        return tasks, dataset
    asked = list(zip(dataset.documents, rows, strict=False)) if dataset is not None else []
    asked += [(as_document(question), question) for task in tasks if not task.held_out for question in task.questions]
    ids = tuple(_check_prompts(run, asked)[: len(rows)])
    return [replace(task, prompts=ids) if task.held_out else task for task in tasks], dataset


def read_questions(run: Run) -> list[Question]:
    """The held-out rows that eval.limit draws. Raises RecipeError without data.eval, DataError for a bad row."""
    dataset, _ = _read_rows(run)
    rows = _questions_of(dataset.documents, eval_tasks(run.recipe))
    _check_prompts(run, list(zip(dataset.documents, rows, strict=False)))
    return rows


def as_document(question: Question) -> Document:
    answer = text_message("assistant", question.expected)
    return Document(messages=(*question.messages, answer), origin=question.origin, images=question.images)


def check_tasks(run: Run) -> None:
    """Raises what open_tasks does of unreadable questions and programs that are not here; fetches no checkpoint."""
    entries = eval_tasks(run.recipe)
    if not entries:
        _refuse_no_rows()
    if any(entry.task not in SOURCES for entry in entries):
        documents = _draw(read_held_out(run.recipe).documents, run.recipe.eval)
        _questions_of(documents, entries, tools=not run.recipe.data.thinking)
    for entry in entries:
        if entry.task in SOURCES:
            source_questions(entry.task, str(entry.dataset), prompt_of(entry))
            find_source(entry.task).open_judges((), unsafe=entry.unsafe)


def _hash_questions(rows: Sequence[Question]) -> str:
    hashed = []
    for row in rows:
        beside = [[image.sha256 for image in row.images], list(row.tools)]
        hashed.append((plain_messages(row.messages), *filter(None, beside), row.expected))
    return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()


def _open_source(run: Run, entry: EvalTask, name: str) -> OpenTask:
    source, recipe = find_source(entry.task), run.recipe
    prompt = prompt_of(entry)
    found = source_questions(entry.task, str(entry.dataset), prompt)
    questions = _draw(found.questions, recipe.eval)
    judges = source.open_judges(questions, unsafe=entry.unsafe)
    asked = tuple(question for question in questions if question.origin not in judges.ungraded)
    if left := list(judges.ungraded):
        why = f"{judges.tool} cannot judge any answer to them: {some(left, 3)}"
        open_console().print(f"eval: {name}: {len(left)} of {len(questions)} questions are left out, since {why}")
    if not asked:
        first, why = next(iter(judges.ungraded.items()))
        raise MachineError(f"eval: {name}: {judges.tool} can judge none of {len(questions)} questions; {first}: {why}")
    default = source.SAMPLING
    how = AskedTask(
        task=entry.task,
        samples=entry.samples or default.samples,
        temperature=default.temperature if entry.temperature is None else entry.temperature,
        top_p=entry.top_p or default.top_p,
        seed=recipe.seed if entry.seed is None else entry.seed,
        max_tokens=entry.max_tokens or recipe.eval.max_tokens,
        # A file by its SHA-256: what it is called says nothing of its text.
        prompt=f"file {hashlib.sha256(prompt.encode()).hexdigest()[:12]}" if is_prompt_file(entry.prompt) else prompt,
        dataset=entry.dataset,
        questions_sha256=found.sha256,
        **_drawn_fields(len(questions), len(found.questions), recipe.eval),
        left_out=dict(judges.ungraded),
        judged_by=judges.tool,
        sandbox=judges.sandboxed,
    )
    return OpenTask(name=name, asked=how, questions=asked, scorer=judges)


def prompt_of(entry: EvalTask) -> str:
    """The name of the way to ask, or the text of a file. Raises DataError for one without a place for a question."""
    if not is_prompt_file(entry.prompt):
        return entry.prompt or find_source(entry.task).PROMPTS[0]
    try:
        text = regular_file(Path(str(entry.prompt))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{entry.prompt}: cannot be read ({reason}); name a text file in UTF-8") from None
    if PLACE not in text:
        raise DataError(f"{entry.prompt}: has no {PLACE}; write it where each question is to stand")
    return text


def _draw(found: Sequence[Item], settings: Eval) -> list[Item]:
    """As many as eval.limit says, in order: the first of a seeded permutation, so that a larger limit only adds."""
    if settings.limit is None or len(found) <= settings.limit:
        return list(found)
    drawn = np.random.default_rng(settings.limit_seed).permutation(len(found))[: settings.limit]
    return [found[place] for place in sorted(drawn.tolist())]


def _drawn_fields(asked: int, there: int, settings: Eval) -> dict[str, int]:
    """How many there are and what drew some of them, where it did: fields of AskedTask."""
    return {"drawn_from": there, "limit_seed": settings.limit_seed} if asked < there else {}


def _read_rows(run: Run, *, elsewhere: bool = False) -> tuple[Dataset, int]:
    """The held-out rows that are asked, and of how many they are."""
    if run.recipe.data.eval is None:
        _refuse_no_rows()
    dataset = read_held_out(run.recipe)
    total, dataset = len(dataset.documents), replace(dataset, documents=_draw(dataset.documents, run.recipe.eval))
    if not any(images_of(document.messages) for document in dataset.documents):
        return dataset, total
    patching = PatchConfig() if elsewhere else _patching_of(run)
    return validate_images(dataset, patching, bad="error", key="data.eval"), total


def _patching_of(run: Run) -> PatchConfig:
    return patching_of(fetch_folder(run.recipe.checkpoint), run.recipe.data.image_tokens)


def _refuse_no_rows() -> NoReturn:
    raise RecipeError(
        "data.eval: names no held-out rows, so there is nothing to score; name a file, a folder, or rows to make"
    )


def _questions_of(documents: Sequence[Document], entries: Sequence[EvalTask], *, tools: bool = False) -> list[Question]:
    """The rows as questions. Raises DataError where there are none, or a task's scorer cannot judge by one.

    `tools`: whether rows with tools are asked; with an image they are not.
    """
    rows = []
    for number, document in enumerate(documents, start=1):
        # Everything before the last answer, and that answer.
        messages = document.messages
        last = next((index for index in reversed(range(len(messages))) if messages[index].role == "assistant"), None)
        if not last:
            why = "has no assistant turn that follows another, so nothing to compare with"
            raise DataError(f"data.eval: row {number} {why}; take the row out")
        if not tools or images_of(messages):
            who = "only eval asks, and only of its own servers, without images or data.thinking"
            refuse_tools(
                document, who, "measure their loss while training (train.eval_steps), and run with --skip eval"
            )
        question = Question(
            messages=messages[:last],
            expected=text_of(messages[last]).replace(BREAK, ""),
            origin=document.origin,
            columns=document.columns,
            images=document.images[: len(images_of(messages[:last]))],
            tools=document.tools,
        )
        rows.append(question)
    if not rows:
        raise DataError("data.eval: holds no rows; name a dataset with at least one")
    for entry in entries:
        scorer = None if entry.task in SOURCES else find_scorer(entry.task)
        if isinstance(scorer, MultipleChoiceScorer) and (
            seen := next(
                (row for row in rows if images_of(row.messages) or are_broken(row.messages) or has_tools(row)), None
            )
        ):
            what = "an image" if images_of(seen.messages) else "a control token that is to be read as text"
            what = "tools" if has_tools(seen) else what
            why = f"asks how likely answers are after a prompt of text, and {seen.origin} has {what}"
            remedy = "set eval.scorer to one that reads what is written, such as labels"
            raise RecipeError(f"eval: {entry.task} {why}; {remedy}")
        if isinstance(scorer, SupportsValidation):
            for question in rows:
                scorer.check(question)
    return rows


def _with_calls(run: Run, documents: Sequence[Document], rows: Sequence[Question]) -> list[Question]:
    """The questions, those that are to be answered by calling tools with the text that such an answer has."""
    called = {row: document for row, document in enumerate(documents) if document.messages[-1].tool_calls}
    if not called:
        return list(rows)
    answers = []
    for document in called.values():  # no question asks for reasoning
        *before, last = document.messages
        answers.append(replace(document, messages=(*before, replace(last, beside={"tool_calls": last.tool_calls}))))
    written = written_answers_in_process(fetch_folder(run.recipe.checkpoint), run.recipe.data, answers)
    texts = dict(zip(called, written, strict=True))
    return [replace(row, expected=texts.get(place, row.expected)) for place, row in enumerate(rows)]


def _check_prompts(run: Run, asked: Sequence[tuple[Document, Question]]) -> list[np.ndarray]:
    """The prompts' ids. A server reads control tokens wherever they stand in a prompt's text."""
    prompts = [(document, len(question.messages)) for document, question in asked]
    return check_prompts_in_process(fetch_folder(run.recipe.checkpoint), run.recipe.data, prompts)
