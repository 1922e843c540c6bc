"""An answer as tokens and log-probabilities, which completions and chats write in two ways."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemsmith.serve.chat import Failure

# As many as vLLM gives by default.
TOP = 20


@dataclass(frozen=True, kw_only=True)
class AnswerTokens:
    """A greedy answer's tokens, and the log-probabilities of the likeliest at each place."""

    tokens: tuple[str, ...]
    top: tuple[Mapping[str, float], ...]


def read_tokens(choice: Mapping[str, Any]) -> AnswerTokens | Failure:
    """Tokens and log-probabilities of a choice of a completion or a chat."""
    found: Any = choice.get("logprobs")
    try:
        if "tokens" in found:
            tokens = AnswerTokens(tokens=tuple(found["tokens"]), top=tuple(dict(top) for top in found["top_logprobs"]))
        else:
            tops = tuple(
                {other["token"]: other["logprob"] for other in entry["top_logprobs"]} for entry in found["content"]
            )
            tokens = AnswerTokens(tokens=tuple(entry["token"] for entry in found["content"]), top=tops)
        complete = all(math.isfinite(top[token]) for token, top in zip(tokens.tokens, tokens.top, strict=True))
    except (KeyError, TypeError, ValueError):
        complete = False
    return tokens if complete else Failure(reason="no log-probabilities", detail=json.dumps(choice)[:300])


def difference(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The most by which two lists of the likeliest differ; a token that one lacks counts as its least likely.

    >>> difference({"a": -0.1, "b": -3.0}, {"a": -0.2, "c": -2.0})
    1.0
    """
    if not one or not other:
        return 0.0
    lows = min(one.values()), min(other.values())
    return max(abs(one.get(token, lows[0]) - other.get(token, lows[1])) for token in {*one, *other})
