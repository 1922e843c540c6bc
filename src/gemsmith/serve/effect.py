"""Whether a server applies the adapter that it has loaded, and to the tuned model alone.

vLLM may load a Gemma 4 adapter and answer as the base does (gemsmith.serve.known, ADAPTER_IGNORED), or apply it to
the base, too, where a batch holds both (gemsmith.serve.upstream, SPARE_ADAPTER_ON_CPU).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from gemsmith.errors import EngineError
from gemsmith.serve.chat import Failure, read_choice, read_object
from gemsmith.serve.engine import api_headers
from gemsmith.serve.known import ADAPTER_IGNORED
from gemsmith.serve.server import Server
from gemsmith.serve.tokens import TOP, AnswerTokens, difference, read_tokens

# Ids that every vocabulary has; what they mean does not matter.
PROMPTS = tuple([2, *range(first, first + 80, 10)] for first in (300, 401, 502, 603))
ANSWER_TOKENS = 4
# By how much log-probabilities may differ by rounding, where sums come in another order: of float32, of bfloat16.
_ROUNDING, _ROUNDING_OTHERWISE = {"float32": 1e-3}, 0.05
_TIMEOUT_S = 600.0


def measure_effect(base: Server, tuned: Server, *, expected: float | None) -> float:
    """The most that the adapter changes a first token's log-probability over a few prompts.

    Raises EngineError where that is no more than rounding makes: vLLM has ignored the adapter; and where the base
    answers otherwise beside the tuned model than alone: it got the adapter, too. `expected`: how much verify saw the
    adapter change logits; one that changes next to nothing is no error.
    """
    with httpx.Client(timeout=_TIMEOUT_S, headers=dict(api_headers()), trust_env=False) as client:
        # One at a time: in a batch, sums may come in another order.
        adapted = [_ask(tuned, client, prompt) for prompt in PROMPTS]
        plain = [_ask(base, client, prompt) for prompt in PROMPTS]
        both = [(server, prompt) for prompt in PROMPTS for server in (base, tuned)]
        with ThreadPoolExecutor(len(both)) as pool:
            together = list(pool.map(lambda one: _ask(one[0], client, one[1]), both))[::2]
    effect = max(difference(one.top[0], other.top[0]) for one, other in zip(plain, adapted, strict=True))
    strayed = max(difference(one.top[0], other.top[0]) for one, other in zip(plain, together, strict=True))
    rounding = _ROUNDING.get(base.facts.dtype or "", _ROUNDING_OTHERWISE)
    if strayed > rounding and strayed > effect / 10:
        raise EngineError(
            f"vLLM at {tuned.url} applies the adapter {tuned.model} to the base, too: beside the tuned model "
            f"{base.model} answers otherwise than alone, by {strayed:.2g} in log-probability; set serve.weights "
            "to merged"
        )
    if effect <= rounding and (expected is None or expected > 10 * rounding):
        raise EngineError(
            f"vLLM at {tuned.url} loaded the adapter {tuned.model} and ignores it ({ADAPTER_IGNORED.link}): its "
            f"answers' log-probabilities are the base's (they differ by {effect:.2g}); set serve.weights to merged"
        )
    return effect


def _ask(server: Server, client: httpx.Client, prompt: Sequence[int]) -> AnswerTokens:
    """The greedy continuation by ANSWER_TOKENS."""
    asked: dict[str, Any] = {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    asked |= {"logprobs": TOP, "ignore_eos": True}
    try:
        response = client.post(f"{server.url}/v1/completions", json=asked)
    except httpx.RequestError as error:
        server.check()
        raise EngineError(f"vLLM at {server.url} did not answer {server.model} ({error}); see {server.log}") from None
    found = read_object(response.status_code, response.content)
    choice = found if isinstance(found, Failure) else read_choice(found)
    answer = choice if isinstance(choice, Failure) else read_tokens(choice)
    if isinstance(answer, AnswerTokens):
        if len(answer.tokens) == ANSWER_TOKENS:
            return answer
        answer = Failure(reason="other tokens", detail=f"{list(answer.tokens)} where {ANSWER_TOKENS} were asked for")
    raise EngineError(
        f"vLLM at {server.url} answered {server.model} with {answer.reason}: {answer.detail}; its log is {server.log}"
    )
