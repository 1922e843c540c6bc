"""The stage `eval`: greedy answers of the tuned and the base model to the held-out rows, scored."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.checkpoint import open_checkpoint
from gemsmith.checkpoint.fetch import fetch_folder
from gemsmith.data.overlap import Overlap, find_overlap, overlap_notices, read_answers
from gemsmith.data.rows import Dataset, Document, describe_columns, read_held_out
from gemsmith.data.template import find_template
from gemsmith.data.workers import check_prompts_in_process
from gemsmith.errors import DataError, EngineError, RecipeError, ScorerError
from gemsmith.evals.ask import Request, ask_all
from gemsmith.evals.compare import Comparison, compare, unmoved_notices, worse_notices
from gemsmith.evals.judging import judge_all
from gemsmith.evals.kept import appending, digest_model, digest_question, keep, read_kept
from gemsmith.evals.scoring import score
from gemsmith.files import replacing, sha256_file
from gemsmith.messages import plain_messages, text_message, text_of
from gemsmith.provenance import start_clock
from gemsmith.records import EvalRecord, ExportRecord, Score
from gemsmith.run import Run, read_record, write_record
from gemsmith.serve.chat import Failure, Reply, read_chat
from gemsmith.serve.server import Server
from gemsmith.serve.stage import Servers, origin_with_engine
from gemsmith.tasks import Question, Verdict, find_scorer
from gemsmith.terminal import open_console, open_progress

ANSWERS = "eval_answers.jsonl"
EXAMPLES = 5
# Of all rows. A row without an answer counts as not right, and with more of them a score is the server's and not the
# model's.
MOST_FAILED = 0.05


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model answered, and what the scorer makes of it."""

    text: str
    right: bool
    cut: bool
    """It reached eval.max_tokens before it had ended."""
    reason: str | None = None
    """Why it is not right, where the scorer says so."""
    failed: str | None = None
    """Why there is no answer, and so no text."""
    unscored: str | None = None
    """Why the scorer could not judge it."""


def evaluate(run: Run, servers: Servers) -> EvalRecord:
    """Scores tuned and base on the same rows and records both; each row's answers go to logs/eval_rows.jsonl.

    Answers are kept in logs/eval_answers.jsonl as they come, and a second start asks for the others only.

    Raises RecipeError where data.eval is not given, DataError where a row has no answer to compare with, EngineError
    where the server dies or more than MOST_FAILED of the rows fail, ScorerError where the scorer fails on as many.
    """
    clock = start_clock()
    dataset = _read_rows(run)
    if dataset.ignored_columns:
        console = open_console()
        console.print(f"eval: ignored the columns {describe_columns(dataset.ignored_columns)}")
    questions = _choose_questions(run, dataset.documents)
    overlap = _find_trained(questions, run)
    # Tuned first: its server is often still up from serve or bench, so that servers change once.
    read_record(run, ExportRecord)
    servers.check_verified()  # also where all answers are there from an earlier start
    model = digest_model(run, run.merged, sha256_file(run.record_file("export")))
    tuned = answer_all(run, questions, "tuned", digest=model, start=servers.tuned)
    checkpoint = open_checkpoint(run.recipe.checkpoint)
    model = digest_model(run, checkpoint.folder, checkpoint.fingerprint())
    base = answer_all(run, questions, "base", digest=model, start=servers.base)
    server = servers.base()
    rows = [_row(number, *row) for number, row in enumerate(zip(questions, base, tuned, strict=True), start=1)]
    with replacing(run.logs / "eval_rows.jsonl") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    comparison = _compare_answered(base, tuned)
    asked = json.dumps([(plain_messages(question.messages), question.expected) for question in questions])
    sources = {"questions": hashlib.sha256(asked.encode()).hexdigest()}
    record = EvalRecord(
        origin=origin_with_engine(run, "eval", clock, server, sources=sources),
        notices=(
            *servers.notices,
            *_notices("base", base),
            *_notices("tuned", tuned),
            *unmoved_notices(comparison),
            *overlap_notices(overlap),
        ),
        scorer=run.recipe.eval.scorer,
        ignored_columns=dict(dataset.ignored_columns),
        base=_score(base),
        tuned=_score(tuned),
        examples=choose_examples(rows),
        rows_better=comparison.better,
        rows_worse=comparison.worse,
        p_value=comparison.p_value,
        held_out_also_trained=overlap.prompts if overlap else None,
        grave_notices=worse_notices(comparison),
    )
    write_record(run, record)
    (run.logs / ANSWERS).unlink(missing_ok=True)
    return record


def _compare_answered(base: Sequence[Answer], tuned: Sequence[Answer]) -> Comparison:
    """Of the rows that both models have answered and a scorer has judged."""
    pairs = [pair for pair in zip(base, tuned, strict=True) if not any(one.failed or one.unscored for one in pair)]
    return compare([one.right for one, _ in pairs], [other.right for _, other in pairs])


def read_questions(run: Run) -> list[Question]:
    """The held-out rows, the first eval.limit of them.

    Raises RecipeError where data.eval is not given, DataError where a row has no answer to compare with, or its text
    would forge turns.
    """
    return _choose_questions(run, _read_rows(run).documents)


def _read_rows(run: Run) -> Dataset:
    recipe = run.recipe
    if recipe.data.eval is None:
        raise RecipeError(
            "data.eval: names no held-out rows, so there is nothing to score; name a file, a folder, or rows to make"
        )
    return read_held_out(recipe)


def check_rows(run: Run) -> None:
    """Raises what read_questions does of rows that have no form or no answer; it needs and fetches no checkpoint."""
    _questions_of(run, _read_rows(run).documents)


def _questions_of(run: Run, documents: Sequence[Document]) -> list[Question]:
    questions = [_question(document, number) for number, document in enumerate(documents, start=1)]
    if not questions:
        raise DataError("data.eval: holds no rows; name a dataset with at least one")
    return questions[: run.recipe.eval.limit]


def _choose_questions(run: Run, documents: Sequence[Document]) -> list[Question]:
    recipe, asked = run.recipe, _questions_of(run, documents)
    # A server reads control tokens wherever they stand in a prompt's text.
    folder = fetch_folder(recipe.checkpoint)
    prompts = [(document, len(question.messages)) for document, question in zip(documents, asked, strict=False)]
    check_prompts_in_process(folder, find_template(folder, recipe.data.template), prompts)
    return asked


def answer_all(
    run: Run, questions: Sequence[Question], model: str, *, digest: str, start: Callable[[], Server]
) -> list[Answer]:
    """The model's greedy answer to each question, in order.

    Those kept from an earlier start under `digest` are not asked for again. The server is started only where answers
    are missing.
    """
    keys = [digest_question(digest, question.messages) for question in questions]
    kept = read_kept(run.logs / ANSWERS)
    replies: dict[int, Reply | Failure] = {number: kept[key] for number, key in enumerate(keys) if key in kept}
    console = open_console()
    if replies:
        console.print(f"eval: {model}: {len(replies)} of {len(questions)} answers are there from an earlier start")
    if len(replies) < len(questions):
        _ask_missing(run, start(), questions, keys=keys, replies=replies)
    answers = _judge(run, model, questions, [replies[number] for number in range(len(questions))])
    console.print(_describe(model, _score(answers)))
    return answers


def choose_examples(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """A few rows that both have answered, in order: up to two that the tuned model got wrong, and the first others."""
    rows = [row for row in rows if not row.get("base_failed") and not row.get("tuned_failed")]
    wrong = [row for row in rows if not row["tuned_right"]][:2]
    others = [row for row in rows if row not in wrong][: EXAMPLES - len(wrong)]
    return tuple(dict(row) for row in sorted([*wrong, *others], key=lambda row: row["row"]))


def _question(document: Document, number: int) -> Question:
    """Everything before the last answer, and that answer."""
    messages = document.messages
    last = next((index for index in reversed(range(len(messages))) if messages[index].role == "assistant"), None)
    if not last:
        raise DataError(
            f"data.eval: row {number} has no assistant turn that follows another, so nothing to compare with; take the "
            "row out"
        )
    return Question(
        messages=messages[:last], expected=text_of(messages[last]), origin=document.origin, columns=document.columns
    )


def _find_trained(questions: Sequence[Question], run: Run) -> Overlap | None:
    """Which questions were trained on, by the hashes that the data stage left; None where it left none."""
    trained = read_answers(run.data)
    if trained is None:
        return None
    rows = [
        Document(messages=(*question.messages, text_message("assistant", question.expected)), origin=question.origin)
        for question in questions
    ]
    return find_overlap(trained, rows)


def _ask_missing(
    run: Run, server: Server, questions: Sequence[Question], *, keys: Sequence[str], replies: dict[int, Reply | Failure]
) -> None:
    """Adds the replies that are not there yet, eval.concurrency requests at a time, and keeps each under its key."""
    settings = run.recipe.eval
    missing = [number for number in range(len(questions)) if number not in replies]
    requests = [_request(server, questions[number], settings.max_tokens) for number in missing]
    console = open_console()
    with (
        appending(run.logs / ANSWERS) as stream,
        open_progress(console) as progress,
    ):
        task = progress.add_task(f"eval {server.model}", total=len(questions), completed=len(replies))

        def heard(place: int, found: dict[str, Any] | Failure) -> None:
            number = missing[place]
            replies[number] = reply = found if isinstance(found, Failure) else read_chat(found)
            if isinstance(reply, Failure):
                _refuse_many_failures(server, replies, len(questions))
            else:
                keep(stream, keys[number], reply)
            progress.advance(task)

        ask_all(server, requests, heard, concurrency=settings.concurrency)


def _request(server: Server, question: Question, max_tokens: int) -> Request:
    messages = plain_messages(question.messages)
    body = {"model": server.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return Request(path="/v1/chat/completions", body=body)


def _judge(run: Run, model: str, questions: Sequence[Question], replies: Sequence[Reply | Failure]) -> list[Answer]:
    """The replies as answers. Raises ScorerError where too many of them cannot be judged."""
    name = run.recipe.eval.scorer
    texts = {number: reply.text for number, reply in enumerate(replies) if isinstance(reply, Reply)}
    found = judge_all(find_scorer(name), [(questions[number], (text,)) for number, text in texts.items()])
    judged = dict(zip(texts, found, strict=True))
    if failures := _too_many(judged, len(questions)):
        raise ScorerError(
            f"eval: {model}: the scorer {name} could not judge {_describe_failures(failures, len(questions))}; the "
            "same command asks for no answer again"
        )
    return [_answer(reply, judged.get(number)) for number, reply in enumerate(replies)]


def _answer(reply: Reply | Failure, judged: tuple[Verdict, ...] | Failure | None) -> Answer:
    if isinstance(reply, Failure):
        return Answer(text="", right=False, cut=False, failed=reply.reason)
    if isinstance(judged, Failure):
        return Answer(text=reply.text, right=False, cut=reply.cut, unscored=judged.reason)
    assert judged is not None and len(judged) == 1
    return Answer(text=reply.text, right=judged[0].right, cut=reply.cut, reason=judged[0].reason)


def _refuse_many_failures(server: Server, replies: Mapping[int, Reply | Failure], rows: int) -> None:
    failures = _too_many(replies, rows)
    if not failures:
        return
    timed_out = any(failure.reason == "timeout" for failure in failures.values())
    slower = "; a lower eval.concurrency makes each answer faster" if timed_out else ""
    raise EngineError(
        f"eval: {server.model}: no answer to {_describe_failures(failures, rows)}{slower}; see {server.log}. The same "
        "command asks only for what is missing"
    )


def _too_many(found: Mapping[int, object], rows: int) -> dict[int, Failure]:
    """The failures in it by row, where they are more than MOST_FAILED of the rows; else none."""
    failures = {number: one for number, one in sorted(found.items()) if isinstance(one, Failure)}
    return failures if len(failures) > MOST_FAILED * rows else {}


def _describe_failures(failures: Mapping[int, Failure], rows: int) -> str:
    """How many rows have failed, why, and the first of them."""
    number, first = next(iter(failures.items()))
    return (
        f"{len(failures)} of {rows} rows, more than {MOST_FAILED:.0%} "
        f"({_counted(Counter(failure.reason for failure in failures.values()))}): "
        f"row {number + 1}: {first.reason}: {first.detail}"
    )


def _counted(reasons: Mapping[str, int]) -> str:
    """{"http 500": 2, "timeout": 1} → "2 http 500, 1 timeout"."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def _notices(model: str, answers: Sequence[Answer]) -> list[str]:
    """What must be known of a model's answers before its score."""
    failed = Counter(answer.failed for answer in answers if answer.failed)
    unscored = Counter(answer.unscored for answer in answers if answer.unscored)
    empty = sum(not answer.text and not answer.failed for answer in answers)
    notices = []
    if failed:
        text = (
            f"The {model} model's server gave no answer to {failed.total()} of {len(answers)} rows ({_counted(failed)})"
        )
        notices.append(f"{text}; they count as not right.")
    if unscored:
        text = f"The scorer could not judge {unscored.total()} of {len(answers)} answers of the {model} model"
        notices.append(f"{text} ({_counted(unscored)}); they count as not right.")
    if empty:
        text = f"{empty} of {len(answers)} answers of the {model} model are empty"
        notices.append(f"{text}: it wrote nothing, or only what a reasoning or tool parser of vLLM takes out.")
    return notices


def _score(answers: Sequence[Answer]) -> Score:
    failed = Counter(answer.failed for answer in answers if answer.failed)
    unscored = Counter(answer.unscored for answer in answers if answer.unscored)
    cut = sum(answer.cut for answer in answers)
    return score([answer.right for answer in answers], cut=cut, failed=failed, unscored=unscored)


def _row(number: int, question: Question, base: Answer, tuned: Answer) -> dict[str, Any]:
    return {
        "row": number,
        "prompt": "\n\n".join(text_of(message) for message in question.messages),
        "expected": question.expected,
        "base": base.text,
        "tuned": tuned.text,
        "base_right": base.right,
        "tuned_right": tuned.right,
        "base_cut": base.cut,
        "tuned_cut": tuned.cut,
        "base_failed": base.failed,
        "tuned_failed": tuned.failed,
        "base_reason": base.reason or base.unscored,
        "tuned_reason": tuned.reason or tuned.unscored,
    }


def _describe(model: str, found: Score) -> str:
    cut = f", {found.cut} cut at eval.max_tokens" if found.cut else ""
    failed = f", no answer to {sum(found.failed.values())}" if found.failed else ""
    unscored = f", no verdict on {sum(found.unscored.values())}" if found.unscored else ""
    interval = f"{found.low:.1%} to {found.high:.1%}, n = {found.n}"
    return f"eval: {model}: {found.score:.1%} right ({interval}{cut}{failed}{unscored})"
