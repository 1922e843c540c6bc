"""How likely a model finds given answers, from vLLM's log-probabilities of a prompt's tokens.

The prompt's ids P are those of the server's own /tokenize for the chat, its generation prompt included: what the model
would continue. A choice is tokenized alone, to C. It is then asked for the ids P C, and the log-probabilities of the
last len(C) of them are summed. So no token belongs half to the prompt, and the prompt's tokens are never counted.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gemsmith.serve.client.batch import Request, ask_all
from gemsmith.serve.client.chat import Failure, Reply, read_choice
from gemsmith.serve.client.endpoint import AnyServer
from gemsmith.tasks.messages import Message, plain_messages

Asked = Mapping[int, tuple[Sequence[Message], Sequence[str]]]
"""The number of a question -> its messages and its choices."""


def ask_likelihoods(
    server: AnyServer, asked: Asked, heard: Callable[[int, Reply | Failure], None], *, concurrency: int
) -> None:
    """Calls `heard` with each question's number and its choices' log-probabilities as JSON, or why one has failed."""
    tokenized = _tokenize(server, asked, concurrency)
    lengths: list[tuple[int, str, int]] = []
    requests: list[Request] = []
    for number, (_, choices) in asked.items():
        ids: list[list[int]] = []
        for each in (tokenized[number], *(tokenized[choice] for choice in choices)):
            if isinstance(each, Failure):
                heard(number, each)
                break
            ids.append(each)
        else:
            prompt, *rest = ids
            lengths += [(number, choice, len(last)) for choice, last in zip(choices, rest, strict=True)]
            for last in rest:
                # One token is written since none cannot be asked for; 0: log-probabilities of the prompt's alone.
                body = {"model": server.model, "prompt": [*prompt, *last], "max_tokens": 1, "temperature": 0}
                requests.append(Request(path="/v1/completions", body={**body, "prompt_logprobs": 0}))
    found: dict[int, dict[str, dict[str, Any] | Failure]] = {number: {} for number in asked}

    def add(place: int, reply: dict[str, Any] | Failure) -> None:
        number, choice, last = lengths[place]
        logprob = reply if isinstance(reply, Failure) else read_logprob(reply, requests[place].body["prompt"], last)
        said = {"choice": choice, "logprob": logprob, "tokens": last}
        found[number][choice] = logprob if isinstance(logprob, Failure) else said
        if len(found[number]) == len(asked[number][1]):
            listed = [found[number][choice] for choice in asked[number][1]]
            failure = next((each for each in listed if isinstance(each, Failure)), None)
            heard(number, failure or Reply(text=json.dumps(listed, ensure_ascii=False), cut=False))

    ask_all(server, requests, add, concurrency=concurrency)


def read_logprob(reply: Mapping[str, Any], ids: Sequence[int], last: int) -> float | Failure:
    """The sum of the log-probabilities of the last ids of a prompt, from a completion with prompt_logprobs."""
    choice = read_choice(reply)
    if isinstance(choice, Failure):
        return choice
    listed = choice.get("prompt_logprobs")
    if not isinstance(listed, list) or len(listed) != len(ids):
        return Failure(reason="no log-probabilities", detail="the server gave none for the prompt's tokens")
    total = 0.0
    for token, entry in zip(ids[-last:], listed[-last:], strict=True):
        match entry[str(token)] if isinstance(entry, dict) and str(token) in entry else None:
            case {"logprob": float() | int() as logprob}:
                total += logprob
            case _:
                return Failure(reason="no log-probabilities", detail=f"none for the token {token}")
    return total


def _tokenize(server: AnyServer, asked: Asked, concurrency: int) -> dict[int | str, list[int] | Failure]:
    """The ids of each question's prompt, by its number, and of each choice, by its text; or why there are none."""
    bodies: dict[int | str, dict[str, Any]] = {
        number: {"messages": plain_messages(messages), "add_generation_prompt": True}
        for number, (messages, _) in asked.items()
    }
    for _, choices in asked.values():
        bodies |= {choice: {"prompt": choice, "add_special_tokens": False} for choice in choices}
    found: dict[int | str, list[int] | Failure] = {}
    names = list(bodies)

    def heard(place: int, reply: dict[str, Any] | Failure) -> None:
        ids = reply if isinstance(reply, Failure) else reply.get("tokens")
        if not isinstance(ids, Failure) and not (
            isinstance(ids, list) and ids and all(isinstance(token, int) for token in ids)
        ):
            ids = Failure(reason="no tokens", detail="the server's /tokenize gave none")
        found[names[place]] = ids

    requests = [Request(path="/tokenize", body={"model": server.model, **body}) for body in bodies.values()]
    ask_all(server, requests, heard, concurrency=concurrency)
    return found
