"""The stage `eval`: greedy answers of the tuned and the base model to the held-out rows, scored."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from gemsmith.data.rows import read_documents
from gemsmith.errors import DataError, EngineError, RecipeError
from gemsmith.evals.scoring import is_right, score
from gemsmith.records import EvalRecord, Score
from gemsmith.run import Run, replacing, start_clock, write_record
from gemsmith.serve.engine import api_headers
from gemsmith.serve.server import Server
from gemsmith.serve.stage import Servers, origin_with_engine

TIMEOUT_S = 1800.0
EXAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out row: what the model is told, and what it should answer."""

    messages: tuple[Mapping[str, str], ...]
    expected: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model answered. `cut`: it reached eval.max_tokens before it had ended."""

    text: str
    right: bool
    cut: bool


def evaluate(run: Run, servers: Servers) -> EvalRecord:
    """Scores tuned and base on the same rows and records both; each row's answers go to logs/eval_rows.jsonl.

    Raises RecipeError where data.eval is not given, DataError where a row has no answer to compare with, EngineError where a request fails.
    """
    clock = start_clock()
    questions = read_questions(run)
    # Tuned first: its server is often still up from serve or bench, so that servers change once.
    server = servers.tuned()
    tuned = ask_all(server, questions, run)
    base = ask_all(servers.base(), questions, run)
    rows = [_row(number, *row) for number, row in enumerate(zip(questions, base, tuned, strict=True), start=1)]
    with replacing(run.logs / "eval_rows.jsonl") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    asked = json.dumps([(question.messages, question.expected) for question in questions])
    record = EvalRecord(
        origin=origin_with_engine(run, "eval", clock, server, sources={"questions": hashlib.sha256(asked.encode()).hexdigest()}),
        scorer=run.recipe.eval.scorer,
        base=_score(base),
        tuned=_score(tuned),
        examples=choose_examples(rows),
    )
    write_record(run, record)
    return record


def read_questions(run: Run) -> list[Question]:
    """The held-out rows, the first eval.limit of them."""
    recipe = run.recipe
    if recipe.data.eval is None:
        raise RecipeError("data.eval: names no held-out rows, so there is nothing to score; name a file, a folder, or rows to make")
    documents = read_documents(recipe.data.eval, format=recipe.data.format, seed=recipe.seed)
    questions = [_question(document.messages, number) for number, document in enumerate(documents, start=1)]
    if not questions:
        raise DataError("data.eval: holds no rows; name a dataset with at least one")
    return questions[: recipe.eval.limit]


def ask_all(server: Server, questions: Sequence[Question], run: Run) -> list[Answer]:
    """The model's greedy answer to each question, in order; eval.concurrency requests are under way at a time."""
    settings = run.recipe.eval
    limits = httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency)
    client = httpx.Client(base_url=server.url, headers=api_headers(), timeout=TIMEOUT_S, limits=limits, trust_env=False)
    pool = ThreadPoolExecutor(settings.concurrency)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with client, Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"eval {server.model}", total=len(questions))
        asked = [
            pool.submit(_ask, client, server, question, number, settings.max_tokens) for number, question in enumerate(questions, start=1)
        ]
        try:
            answers = []
            for question, future in zip(questions, asked, strict=True):
                text, cut = future.result()
                answers.append(Answer(text=text, right=is_right(text, question.expected, settings.scorer), cut=cut))
                progress.advance(task)
        finally:
            pool.shutdown(cancel_futures=True)
    console.print(_describe(server.model, _score(answers)))
    return answers


def choose_examples(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """A few rows in order: up to two that the tuned model got wrong, the first others."""
    wrong = [row for row in rows if not row["tuned_right"]][:2]
    others = [row for row in rows if row not in wrong][: EXAMPLES - len(wrong)]
    return tuple(dict(row) for row in sorted([*wrong, *others], key=lambda row: row["row"]))


def _question(messages: Sequence[Mapping[str, str]], number: int) -> Question:
    """Everything before the last answer, and that answer."""
    last = next((index for index in reversed(range(len(messages))) if messages[index]["role"] == "assistant"), None)
    if not last:
        raise DataError(f"data.eval: row {number} has no assistant turn that follows another, so nothing to compare with; take the row out")
    return Question(messages=tuple(dict(message) for message in messages[:last]), expected=messages[last]["content"])


def _ask(client: httpx.Client, server: Server, question: Question, number: int, max_tokens: int) -> tuple[str, bool]:
    """The answer's text, and whether it was cut at max_tokens."""
    body = {"model": server.model, "messages": question.messages, "max_tokens": max_tokens, "temperature": 0}
    try:
        response = client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        server.check()
        raise EngineError(
            f"eval: row {number}: vLLM at {server.url} did not answer ({type(error).__name__}: {error}); see {server.log}"
        ) from None
    if response.status_code != httpx.codes.OK:
        raise EngineError(f"eval: row {number}: vLLM answered {response.status_code}: {response.text[:300]}; see {server.log}")
    choice = response.json()["choices"][0]
    return choice["message"]["content"] or "", choice["finish_reason"] == "length"


def _score(answers: Sequence[Answer]) -> Score:
    return score([answer.right for answer in answers], cut=sum(answer.cut for answer in answers))


def _row(number: int, question: Question, base: Answer, tuned: Answer) -> dict[str, Any]:
    return {
        "row": number,
        "prompt": "\n\n".join(message["content"] for message in question.messages),
        "expected": question.expected,
        "base": base.text,
        "tuned": tuned.text,
        "base_right": base.right,
        "tuned_right": tuned.right,
        "base_cut": base.cut,
        "tuned_cut": tuned.cut,
    }


def _describe(model: str, found: Score) -> str:
    cut = f", {found.cut} cut at eval.max_tokens" if found.cut else ""
    return f"eval: {model}: {found.score:.1%} right ({found.low:.1%} to {found.high:.1%}, n = {found.n}{cut})"
