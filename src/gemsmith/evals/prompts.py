"""Whether the server reads a prompt as the ids that training made of it: soft tokens, their borders, white space."""

from collections.abc import Mapping, Sequence
from typing import Any

from gemsmith.errors import EngineError
from gemsmith.evals.ask import Request, ask_all
from gemsmith.serve.chat import Failure
from gemsmith.serve.server import Server

COMPARED = 3
"""Prompts of each start of a server; what differs does so in all of them, or by a picture's shape."""
_SHOWN = 8


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
    there, here = (list(ids)[place : place + _SHOWN] for ids in (read, trained))
    raise EngineError(
        f"eval: {name}: vLLM at {server.url} reads another prompt than was trained: {len(read)} tokens, not "
        f"{len(trained)}; from place {place} on {there}, not {here}; set data.template to the one that it was trained "
        f"with, and see {server.log}"
    )
