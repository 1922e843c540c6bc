"""One model's answers to one task: asked for, kept as they come, and judged meanwhile.

What a scorer makes of answers: it may take long, start programs, and fail on one row without ending the others.

Whether the server reads a prompt as the ids that training made of it: soft tokens, their borders, white space.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemsmith.errors import EngineError, GemsmithError, ScorerError, Terminated
from gemsmith.evals.cache import (
    appending,
    digest_question,
    keep,
    keep_server,
    log_retry,
    read_cache,
    read_retries,
    read_server,
)
from gemsmith.evals.likelihood import ask_likelihoods
from gemsmith.evals.tasks import OpenTask
from gemsmith.runs.records import ServerFacts
from gemsmith.runs.run import Run
from gemsmith.serve.client.batch import Request, ask_all
from gemsmith.serve.client.chat import Failure, Reply, api_messages, read_chat
from gemsmith.serve.facts import ask_models
from gemsmith.serve.server import Server
from gemsmith.system.console import open_console, open_progress, track
from gemsmith.tasks import Judges, MultipleChoiceScorer, Question, Scorer, Verdict

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
    except (GemsmithError, Terminated):
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


COMPARED = 3
"""Prompts of each start of a server; what differs does so in all of them, or by a image's shape."""
_SHOWN_IDS = 8


def compare_prompts(server: Server, asked: Mapping[str, tuple[Request, Sequence[int]]]) -> int:
    """How many of the requests the server reads as the ids beside them; the others it did not answer, or does not tell.

    `asked` is by names for messages. Raises EngineError where it reads other ids.
    """
    names, compared = list(asked), 0

    def heard(place: int, found: dict[str, Any] | Failure) -> None:
        nonlocal compared
        ids = None if isinstance(found, Failure) else found.get("prompt_token_ids")
        if isinstance(ids, list):
            refuse_other_ids(server, names[place], ids, asked[names[place]][1])
            compared += 1

    requests = [
        Request(path=request.path, body={**request.body, "max_tokens": 1, "return_token_ids": True})
        for request, _ in asked.values()
    ]
    ask_all(server, requests, heard, concurrency=1)
    return compared


def refuse_other_ids(server: Server, name: str, read: Sequence[int], trained: Sequence[int]) -> None:
    """Raises EngineError, with the first place, where the ids that the server read are not those trained."""
    if list(read) == list(trained):
        return
    place = next(
        (place for place, (one, other) in enumerate(zip(read, trained, strict=False)) if one != other),
        min(len(read), len(trained)),
    )
    there, here = (list(ids)[place : place + _SHOWN_IDS] for ids in (read, trained))
    raise EngineError(
        f"eval: {name}: vLLM at {server.url} reads another prompt than was trained: {len(read)} tokens, not "
        f"{len(trained)}; from place {place} on {there}, not {here}; set data.template to the one that it was trained "
        f"with, and see {server.log}"
    )


ANSWERS = "eval_answers.jsonl"
DONE = "eval_answered.jsonl"
"""What ANSWERS is called once the record is written: tasks that are added later do not ask again for the others'."""
AGAIN = "eval_answers_again.jsonl"
"""What takes the place of both once an evaluation that is done again is complete."""
# Of all answers. One that did not come counts as not right, and with more of them a score is the server's and not the
# model's.
MOST_FAILED = 0.05
# A server that dies is started again as often, and only where it has answered something since its last start.
MOST_RESTARTS = 3
PROOF_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model answered, and what the scorer makes of it."""

    text: str
    right: bool
    cut: bool
    """It reached the limit of tokens before it had ended."""
    tokens: int | None = None
    reason: str | None = None
    """Why it is not right, where the scorer says so."""
    detail: str = ""
    failed: str | None = None
    """Why there is no answer, and so no text."""
    ungraded: str | None = None
    """Why the scorer could not judge it."""
    others: Mapping[str, bool] = field(default_factory=dict)
    """Whether it is right by the scorer's other measures."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A model's answers to a task: for each question as many as there are samples."""

    answers: tuple[tuple[Answer, ...], ...]
    retries: Mapping[str, int]
    prompts_compared: int = 0
    """Prompts with images that a server was seen to read as the ids that training makes of them."""
    server: ServerFacts | None = None
    """What the last server said of itself that was asked; None of one that an earlier version asked."""

    def all(self) -> list[Answer]:
        return [answer for answers in self.answers for answer in answers]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the run; `role` is base or tuned.

    `digest(max_tokens)` is of all that makes its answers but the question. `stop` ends its server so that `start`
    starts another.
    """

    role: str
    digest: Callable[[int], str]
    start: Callable[[], Server]
    stop: Callable[[], None]


@dataclass(kw_only=True)
class _Asking:
    """What is known so far of the answers to a task, each under its index: question times samples, plus sample."""

    run: Run
    task: OpenTask
    model: Model
    digest: str
    keys: Sequence[str]
    file: Path
    """Where answers are kept as they come."""
    judge: Callable[[Any, str], Judged]
    replies: dict[int, Reply | Failure]
    judged: dict[int, Judged]
    compared: int = 0

    def on_response(self, number: int, reply: Reply | Failure) -> None:
        self.replies[number] = reply
        if isinstance(reply, Reply):
            question = self.task.questions[number // self.task.sampling.samples]
            self.judged[number] = self.judge(question, reply.text)

    def missing(self) -> list[int]:
        return [number for number in range(len(self.keys)) if number not in self.replies]


def answer_all(run: Run, task: OpenTask, model: Model, *, fresh: bool = False) -> Answers:
    """The model's answers to each question of the task, in order, judged.

    Those kept from an earlier start are not asked for again, where `fresh` from an earlier start of the same; the
    server is started only where answers are missing.
    Raises EngineError where it dies again and again or more than MOST_FAILED of the answers do not come, ScorerError
    where as many cannot be judged.
    """
    digest, samples = model.digest(task.max_tokens), task.sampling.samples
    keys = [_key(task, digest, number) for number in range(len(task.questions) * samples)]
    files = [run.logs / name for name in kept_files(fresh=fresh)]
    kept = {key: reply for file in files for key, reply in read_cache(file).items()}
    with judging(task.scorer) as judge:
        asking = _Asking(
            run=run,
            task=task,
            model=model,
            digest=digest,
            keys=keys,
            file=files[-1],
            judge=judge,
            replies={},
            judged={},
        )
        for number, key in enumerate(keys):
            if key in kept:
                asking.on_response(number, kept[key])
        if asking.replies:
            open_console().print(
                f"eval: {_label(task, model)}: {len(asking.replies)} of {len(keys)} answers are there from an earlier "
                "start"
            )
        if len(asking.replies) < len(keys):
            _ask_missing(asking)
        answers = _gather(asking)
    return Answers(
        answers=tuple(tuple(answers[start : start + samples]) for start in range(0, len(answers), samples)),
        retries=_count_retries(files, keys),
        prompts_compared=asking.compared,
        server=next((found for file in reversed(files) if (found := read_server(file, digest))), None),
    )


def kept_files(*, fresh: bool) -> tuple[str, ...]:
    """Where answers may be already, and are kept as they come: in the last one."""
    return (AGAIN,) if fresh else (DONE, ANSWERS)


def sample_seed(seed: int, question: str, sample: int) -> int:
    """The seed of one sample: another for each question and each sample, the same for base and tuned.

    >>> sample_seed(0, "Prob001_zero", 0) == sample_seed(0, "Prob001_zero", 0) != sample_seed(0, "Prob001_zero", 1)
    True
    """
    digest = hashlib.sha256(json.dumps([seed, question, sample]).encode()).digest()
    return int.from_bytes(digest[:4]) >> 1  # vLLM's seeds are signed


def _drawn(task: OpenTask, number: int) -> dict[str, float] | None:
    """What the request says of how the answer is drawn; None where it is held-out rows', which are greedy."""
    if task.held_out:
        return None
    question, sample = divmod(number, task.sampling.samples)
    seed = sample_seed(task.seed, task.questions[question].origin, sample)
    return {"temperature": task.sampling.temperature, "top_p": task.sampling.top_p, "seed": seed}


def _key(task: OpenTask, digest: str, number: int) -> str:
    question = task.questions[number // task.sampling.samples]
    images = [image.sha256 for image in question.images]
    drawn, choices = _drawn(task, number), _choices(task, question)
    return digest_question(digest, question.messages, drawn=drawn, choices=choices, images=images)


def _choices(task: OpenTask, question: Question) -> tuple[str, ...]:
    """Those whose likelihoods are the answer; none where the scorer reads what is written."""
    return tuple(task.scorer.list_choices(question)) if isinstance(task.scorer, MultipleChoiceScorer) else ()


def _request(server: Server, task: OpenTask, number: int) -> Request:
    question = task.questions[number // task.sampling.samples]
    messages = api_messages(question.messages, question.images, task.patching)
    body = {"model": server.model, "messages": messages, "max_tokens": task.max_tokens, "temperature": 0}
    return Request(path="/v1/chat/completions", body=body | (_drawn(task, number) or {}))


def _ask_missing(asking: _Asking) -> None:
    """Hears the replies that do not exist yet, from a server that is started again where it dies."""
    for restarts_left in reversed(range(MOST_RESTARTS + 1)):
        server, before = asking.model.start(), len(asking.replies)
        try:
            _ask_once(asking, server)
        except EngineError:
            died = _describe_end(server)
            # What a dying server refused is asked for again.
            for number in [number for number, reply in asking.replies.items() if isinstance(reply, Failure)]:
                del asking.replies[number]
            if not (died and restarts_left and len(asking.replies) > before):
                raise
            _tell_restart(asking, server, died)
            asking.model.stop()
        else:
            return


def _describe_end(server: Server) -> str | None:
    """How the server ended; None where it is up, whatever it answers.

    Its guard outlives it while it clears up, so that what nobody listens at is asked for, too.
    """
    if (code := server.process.poll()) is not None:
        return f"vLLM died (exit code {code})"
    return None if ask_models(server.url, timeout_s=PROOF_S) is not None else f"vLLM at {server.url} is gone"


def _tell_restart(asking: _Asking, server: Server, died: str) -> None:
    missing = asking.missing()
    with appending(asking.file) as stream:
        log_retry(stream, asking.keys[missing[0]], "server died")
    open_console().print(
        f"eval: {server.model}: {died} after {len(asking.replies)} of {len(asking.keys)} answers, "
        f"which are kept; it is started again and asked for the other {len(missing)}; its log is {server.log}",
        style="yellow",
    )


def _ask_once(asking: _Asking, server: Server) -> None:
    """Asks for what is missing, eval.concurrency requests at a time, and keeps each answer under its key."""
    missing, keys = asking.missing(), asking.keys
    task = asking.task
    with (
        appending(asking.file) as stream,
        open_progress(open_console()) as progress,
    ):
        keep_server(stream, asking.digest, server.facts)
        bar = progress.add_task(f"eval {server.model}", total=len(keys), completed=len(asking.replies))

        def heard(number: int, reply: Reply | Failure) -> None:
            if isinstance(reply, Reply):
                keep(stream, keys[number], reply)
            asking.on_response(number, reply)
            if isinstance(reply, Failure):
                _refuse_many_failures(asking, server)
            progress.advance(bar)

        def retried(place: int, reason: str) -> None:
            log_retry(stream, keys[missing[place]], reason)

        concurrency = asking.run.recipe.eval.concurrency
        if isinstance(task.scorer, MultipleChoiceScorer):  # rows are asked once: a question's number is its answer's
            asked = {
                number: (task.questions[number].messages, _choices(task, task.questions[number])) for number in missing
            }
            ask_likelihoods(server, asked, heard, concurrency=concurrency)
            return

        def heard_chat(place: int, found: dict[str, Any] | Failure) -> None:
            heard(missing[place], found if isinstance(found, Failure) else read_chat(found))

        asking.compared += _compare_prompts(asking, server)
        # One by one: the images of all of them may not fit into memory.
        requests = (_request(server, task, number) for number in missing)
        ask_all(server, requests, heard_chat, concurrency=concurrency, retried=retried)


def _compare_prompts(asking: _Asking, server: Server) -> int:
    """How many of the first prompts with images the server was seen to read as training made them."""
    task = asking.task
    numbers = [number for number in asking.missing() if task.prompts and task.questions[number].images][:COMPARED]
    asked = {
        task.questions[number].origin: (_request(server, task, number), task.prompts[number].tolist())
        for number in numbers
    }
    return compare_prompts(server, asked) if asked else 0


def _count_retries(files: Sequence[Path], keys: Sequence[str]) -> dict[str, int]:
    ours = set(keys)
    found = [reason for file in files for key, reason in read_retries(file) if key in ours]
    return dict(sorted(Counter(found).items()))


def _gather(asking: _Asking) -> list[Answer]:
    """The replies as answers. Raises ScorerError where too many of them cannot be judged."""
    waiting = sorted(asking.judged)
    judged = {number: asking.judged[number].result() for number in track(waiting, "scoring", open_console())}
    if failures := _too_many(judged, len(asking.keys)):
        raise ScorerError(
            f"eval: {_label(asking.task, asking.model)}: the scorer {asking.task.entry.task} could not judge "
            f"{_describe_failures(asking.task, failures, len(asking.keys))}; the same command asks for no answer again"
        )
    return [_answer(asking.replies[number], judged.get(number)) for number in range(len(asking.keys))]


def _answer(reply: Reply | Failure, judged: Any) -> Answer:
    if isinstance(reply, Failure):
        return Answer(text="", right=False, cut=False, failed=reply.reason)
    if isinstance(judged, Failure):
        return Answer(text=reply.text, right=False, cut=reply.cut, tokens=reply.tokens, ungraded=judged.reason)
    (verdict,) = judged
    return Answer(
        text=reply.text,
        right=verdict.right,
        cut=reply.cut,
        tokens=reply.tokens,
        reason=verdict.reason,
        detail=verdict.detail,
        others=verdict.others,
    )


def _refuse_many_failures(asking: _Asking, server: Server) -> None:
    failures = _too_many(asking.replies, len(asking.keys))
    if not failures:
        return
    timed_out = any(failure.reason == "timeout" for failure in failures.values())
    slower = "; a lower eval.concurrency makes each answer faster" if timed_out else ""
    raise EngineError(
        f"eval: {server.model}: no answer to {_describe_failures(asking.task, failures, len(asking.keys))}{slower}; "
        f"see {server.log}. The same command asks only for what is missing"
    )


def _too_many(found: Mapping[int, object], answers: int) -> dict[int, Failure]:
    """The failures in it by index, where they are more than MOST_FAILED of the answers; else none."""
    failures = {number: one for number, one in sorted(found.items()) if isinstance(one, Failure)}
    return failures if len(failures) > MOST_FAILED * answers else {}


def _describe_failures(task: OpenTask, failures: Mapping[int, Failure], answers: int) -> str:
    """How many answers have failed, why, and the first of them."""
    number, first = next(iter(failures.items()))
    return (
        f"{len(failures)} of {answers} {'rows' if task.held_out else 'questions and samples'}, more than "
        f"{MOST_FAILED:.0%} ({describe_counts(Counter(failure.reason for failure in failures.values()))}): "
        f"{task.name_answer(number)}: {first.reason}: {first.detail}"
    )


def describe_counts(reasons: Mapping[str, int]) -> str:
    """{"http 500": 2, "timeout": 1} → "2 http 500, 1 timeout"."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def _label(task: OpenTask, model: Model) -> str:
    return model.role if task.held_out else f"{task.name}: {model.role}"
