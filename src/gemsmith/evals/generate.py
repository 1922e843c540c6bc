"""One model's answers to one task: asked for, kept as they come, and judged meanwhile."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gemsmith.data.dataset import has_tools
from gemsmith.errors import DataError, EngineError, GemsmithError, ScorerError, Terminated
from gemsmith.evals.cache import AnswerCache, digest_question, open_cache
from gemsmith.evals.likelihood import ask_likelihoods
from gemsmith.evals.tasks import OpenTask
from gemsmith.runs.records import ServerFacts
from gemsmith.runs.run import Run
from gemsmith.serve.client.batch import Request, ask_all
from gemsmith.serve.client.chat import Failure, Reply, api_messages, read_chat
from gemsmith.serve.client.endpoint import AnyServer, RemoteServer
from gemsmith.serve.server import Server
from gemsmith.serve.server import ask as ask_server
from gemsmith.system.console import open_console, open_progress, track
from gemsmith.system.files import sha256_json
from gemsmith.system.format import counts
from gemsmith.system.process import describe_exit
from gemsmith.tasks.base import Judges, MultipleChoiceScorer, Question, Scorer, Verdict
from gemsmith.tasks.messages import are_broken

_SHOWN = 300
COMPARED = 3  # prompts of each start of a server; what differs does so in all of them, or by an image's shape
_SHOWN_IDS = 8
# Of all answers. One that did not come counts as not right, with more of them a score is the server's, not the model's.
MOST_FAILED = 0.05
# A server that dies is started again as often, and only where it has answered something since its last start.
MOST_RESTARTS = 3
PROOF_S = 5.0

Judged = Future[Verdict | Failure]


@dataclass(frozen=True, kw_only=True)
class GradedAnswer:
    text: str
    right: bool
    cut: bool  # it reached the limit of tokens before it had ended
    tokens: int | None = None
    reason: str | None = None  # why it is not right, where the scorer says so
    detail: str = ""
    failed: str | None = None  # why there is no answer, and so no text
    ungraded: str | None = None  # why the scorer could not judge it
    others: Mapping[str, bool] = field(default_factory=dict)  # whether it is right by the scorer's other measures


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A model's answers to a task: for each question as many as there are samples."""

    answers: tuple[tuple[GradedAnswer, ...], ...]
    retries: Mapping[str, int]
    prompts_compared: int = 0
    """Prompts with images that a server was seen to read as the ids that training makes of them."""
    server: ServerFacts | None = None  # what the last server said of itself that was asked

    def all(self) -> list[GradedAnswer]:
        return [answer for answers in self.answers for answer in answers]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the run, base or tuned; `digest(max_tokens)` is of all that makes its answers but the question."""

    role: str
    digest: Callable[[int], str]
    start: Callable[[], AnyServer]
    stop: Callable[[], None] = lambda: None


@dataclass(kw_only=True)
class _Asking:
    """What is known so far of the answers to a task, each under its index: question times samples, plus sample."""

    run: Run
    task: OpenTask
    model: Model
    digest: str
    keys: Sequence[str]
    cache: AnswerCache
    judge: Callable[[Question, str], Judged]
    replies: dict[int, Reply | Failure] = field(default_factory=dict)
    judged: dict[int, Judged] = field(default_factory=dict)
    compared: int = 0

    def on_response(self, number: int, reply: Reply | Failure) -> None:
        self.replies[number] = reply
        if isinstance(reply, Reply):
            self.judged[number] = self.judge(self.task.question_of(number), reply.text)

    def missing(self) -> list[int]:
        return [number for number in range(len(self.keys)) if number not in self.replies]


def answer_all(run: Run, task: OpenTask, model: Model, *, force: bool = False) -> Answers:
    """The model's answers to each question of the task, in order, judged; those kept are not asked for again.

    Raises EngineError where its server keeps dying or MOST_FAILED do not come, ScorerError where as many are unjudged.
    """
    digest, samples, label = model.digest(task.asked.max_tokens), task.asked.samples, task.label(model.role)
    keys = []
    for number in range(len(task.questions) * samples):
        question = task.question_of(number)
        images = [image.sha256 for image in question.images]
        drawn, choices = _drawn(task, number), _choices(task, question)
        keys.append(
            digest_question(
                digest, question.messages, drawn=drawn, choices=choices, images=images, tools=question.tools
            )
        )
    cache = open_cache(run, force=force)
    kept = cache.replies()
    with judging(task.scorer) as judge:
        asking = _Asking(run=run, task=task, model=model, digest=digest, keys=keys, cache=cache, judge=judge)
        for number, key in enumerate(keys):
            if key in kept:
                asking.on_response(number, kept[key])
        if asking.replies:
            open_console().print(
                f"eval: {label}: {len(asking.replies)} of {len(keys)} answers are there from an earlier start"
            )
        if len(asking.replies) < len(keys):
            _ask_missing(asking)
        waiting = sorted(asking.judged)
        judged = {number: asking.judged[number].result() for number in track(waiting, "scoring", open_console())}
        if many := _describe_many(asking, judged):
            why = f"the scorer {task.asked.task} could not judge {many[0]}"
            raise ScorerError(f"eval: {label}: {why}; the same command asks for no answer again")
        answers = [grade(asking.replies[number], judged.get(number)) for number in range(len(keys))]
    return Answers(
        answers=tuple(tuple(answers[start : start + samples]) for start in range(0, len(answers), samples)),
        retries=cache.count_retries(set(keys)),
        prompts_compared=asking.compared,
        server=cache.server(digest),
    )


def sample_seed(seed: int, question: str, sample: int) -> int:
    """The seed of one sample: another for each question and each sample, the same for base and tuned.

    >>> sample_seed(0, "Prob001_zero", 0) == sample_seed(0, "Prob001_zero", 0) != sample_seed(0, "Prob001_zero", 1)
    True
    """
    return int(sha256_json([seed, question, sample])[:8], 16) >> 1  # vLLM's seeds are signed


def make_request(server: AnyServer, task: OpenTask, number: int) -> Request:
    question = task.question_of(number)
    body = {"model": server.model, "max_tokens": task.asked.max_tokens, "temperature": 0} | (_drawn(task, number) or {})
    if are_broken(question.messages) or has_tools(question):
        # By their ids, of which a server reads no control token, and writes tools as the template does.
        if question.images or not task.prompts:
            why = "which a request with images, or to a server elsewhere, cannot spell; set data.control_tokens to drop"
            raise DataError(f"{question.origin}: has a control token that is to be read as text, {why}")
        return Request(path="/v1/completions", body=body | {"prompt": task.prompts[number].tolist()})
    messages = api_messages(question.messages, question.images, task.patching)
    return Request(path="/v1/chat/completions", body=body | {"messages": messages})


def _drawn(task: OpenTask, number: int) -> dict[str, float] | None:
    """What the request says of how the answer is drawn; None where it is held-out rows', which are greedy."""
    if task.held_out:
        return None
    seed = sample_seed(task.asked.seed, task.question_of(number).origin, number % task.asked.samples)
    return {"temperature": task.asked.temperature, "top_p": task.asked.top_p, "seed": seed}


def _choices(task: OpenTask, question: Question) -> tuple[str, ...]:
    """Those whose likelihoods are the answer; none where the scorer reads what is written."""
    return tuple(task.scorer.list_choices(question)) if isinstance(task.scorer, MultipleChoiceScorer) else ()


def _ask_missing(asking: _Asking) -> None:
    """Hears the replies that do not exist yet, from a server that is started again where it dies."""
    for restarts_left in reversed(range(MOST_RESTARTS + 1)):
        server, before = asking.model.start(), len(asking.replies)
        try:
            _ask_once(asking, server)
        except EngineError:
            if isinstance(server, RemoteServer):
                raise
            if (code := server.process.poll()) is not None:
                died = f"vLLM died (exit code {describe_exit(code)})"
            # Its guard outlives it while it clears up, so that what nobody listens at is asked for, too.
            elif ask_server(server.url, timeout_s=PROOF_S) is None:
                died = f"vLLM at {server.url} is gone"
            else:
                raise
            # What a dying server refused is asked for again.
            asking.replies = {number: each for number, each in asking.replies.items() if isinstance(each, Reply)}
            if not restarts_left or len(asking.replies) <= before:
                raise
            missing = asking.missing()
            asking.cache.add(asking.keys[missing[0]], retried="server died")
            kept = f"{died} after {len(asking.replies)} of {len(asking.keys)} answers, which are kept"
            again = f"it is started again and asked for the other {len(missing)}; its log is {server.log}"
            open_console().print(f"eval: {server.model}: {kept}; {again}", style="yellow")
            asking.model.stop()
        else:
            return


def _ask_once(asking: _Asking, server: AnyServer) -> None:
    """Asks for what is missing, eval.concurrency requests at a time, and keeps each answer under its key."""
    missing, keys, task = asking.missing(), asking.keys, asking.task
    concurrency = asking.run.recipe.eval.concurrency
    if isinstance(server, Server):
        asking.cache.add(asking.digest, server=server.facts.model_dump(mode="json"))
    with open_progress(open_console()) as progress:
        bar = progress.add_task(f"eval {server.model}", total=len(keys), completed=len(asking.replies))

        def heard(number: int, reply: Reply | Failure) -> None:
            if isinstance(reply, Reply):
                asking.cache.add(keys[number], **asdict(reply))
            asking.on_response(number, reply)
            if isinstance(reply, Failure) and (many := _describe_many(asking, asking.replies)):
                slower = "; a lower eval.concurrency makes each answer faster" if "timeout" in many[1] else ""
                remedy = f"see {server.log}. The same command asks only for what is missing"
                raise EngineError(f"eval: {server.model}: no answer to {many[0]}{slower}; {remedy}")
            progress.advance(bar)

        if isinstance(task.scorer, MultipleChoiceScorer):  # rows are asked once: a question's number is its answer's
            questions = {number: task.questions[number] for number in missing}
            asked = {number: (each.messages, _choices(task, each)) for number, each in questions.items()}
            ask_likelihoods(server, asked, heard, concurrency=concurrency)
            return
        if task.prompts:
            shown = [number for number in missing if task.questions[number].images][:COMPARED]
            requests_by_row = {
                task.questions[number].origin: (make_request(server, task, number), task.prompts[number].tolist())
                for number in shown
            }
            asking.compared += compare_prompts(server, requests_by_row)
        # One by one: the images of all of them may not fit into memory.
        requests = (make_request(server, task, number) for number in missing)
        ask_all(
            server,
            requests,
            lambda place, found: heard(missing[place], read_chat(found)),
            concurrency=concurrency,
            retried=lambda place, reason: asking.cache.add(keys[missing[place]], retried=reason),
        )


def compare_prompts(server: AnyServer, asked: Mapping[str, tuple[Request, Sequence[int]]]) -> int:
    """How many of the requests the server reads as the ids beside them: soft tokens, their borders, white space.

    `asked` is by names for messages. Raises EngineError, with the first place, where it reads other ids.
    """
    names, compared = list(asked), 0

    def heard(place: int, found: dict[str, Any] | Failure) -> None:
        nonlocal compared
        read = None if isinstance(found, Failure) else found.get("prompt_token_ids")
        if not isinstance(read, list):
            return
        trained = list(asked[names[place]][1])
        if read != trained:
            pairs = enumerate(zip(read, trained, strict=False))
            first = next((at for at, (one, other) in pairs if one != other), min(len(read), len(trained)))
            there, here = (ids[first : first + _SHOWN_IDS] for ids in (read, trained))
            why = f"vLLM at {server.url} reads another prompt than was trained: {len(read)} tokens, not {len(trained)}"
            where = f"from place {first} on {there}, not {here}"
            remedy = f"set data.template to the one that it was trained with, and see {server.log}"
            raise EngineError(f"eval: {names[place]}: {why}; {where}; {remedy}")
        compared += 1

    for_ids = {"max_tokens": 1, "return_token_ids": True}
    requests = [Request(path=request.path, body={**request.body, **for_ids}) for request, _ in asked.values()]
    ask_all(server, requests, heard, concurrency=1)
    return compared


@contextlib.contextmanager
def judging(scorer: Scorer | Judges) -> Iterator[Callable[[Question, str], Judged]]:
    """Until the block ends, a function that has an answer to a question judged; as many at once as there are cores."""
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        yield lambda question, answer: pool.submit(judge, scorer, question, answer)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def judge(scorer: Scorer | Judges, question: Question, answer: str) -> Verdict | Failure:
    """The verdict on an answer to a question, or why the scorer could not judge it.

    An answer is a text that nobody has read, so whatever a scorer raises over it is a reason that is counted: that of
    its ScorerError, or else the exception's name. Only Gemsmith's other errors, such as MachineError, are raised.
    """
    try:
        verdicts: tuple[object, ...] = tuple(scorer.score(question, (answer,)))
    except ScorerError as error:
        return Failure(reason=str(error), detail=str(error))
    except (GemsmithError, Terminated):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a scorer can raise anything over a text that a model wrote
        return Failure(reason=type(error).__name__, detail=" ".join(str(error).split())[:_SHOWN])
    if len(verdicts) != 1:
        return Failure(reason="wrong count", detail=f"score returned {len(verdicts)} verdicts on one answer")
    if not isinstance(verdicts[0], Verdict):
        detail = f"score returned {verdicts[0]!r:.80} in place of a gemsmith.tasks.Verdict"
        return Failure(reason="no verdict", detail=detail)
    return verdicts[0]


def grade(reply: Reply | Failure, judged: Verdict | Failure | None) -> GradedAnswer:
    """A reply and the one verdict on it; None where it did not come."""
    if isinstance(reply, Failure):
        return GradedAnswer(text="", right=False, cut=False, failed=reply.reason)
    answer = GradedAnswer(text=reply.text, right=False, cut=reply.cut, tokens=reply.tokens)
    if isinstance(judged, Failure):
        return replace(answer, ungraded=judged.reason)
    assert judged is not None
    return replace(answer, right=judged.right, reason=judged.reason, detail=judged.detail, others=judged.others)


def _describe_many(asking: _Asking, found: Mapping[int, object]) -> tuple[str, Counter[str]] | None:
    """The failures in it: how many, why, and the first, and their reasons; None where they are not too many."""
    failures = [(number, one) for number, one in sorted(found.items()) if isinstance(one, Failure)]
    answers, task = len(asking.keys), asking.task
    if len(failures) <= MOST_FAILED * answers:
        return None
    reasons, (number, first) = Counter(failure.reason for _, failure in failures), failures[0]
    question, sample = task.question_of(number), number % task.asked.samples + 1
    name = f"row {number + 1}" if task.held_out else f"{question.origin} sample {sample}"
    many = f"{len(failures)} of {answers} {'rows' if task.held_out else 'questions and samples'}"
    return f"{many}, more than {MOST_FAILED:.0%} ({counts(reasons)}): {name}: {first.reason}: {first.detail}", reasons
