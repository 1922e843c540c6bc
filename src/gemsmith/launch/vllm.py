"""What vLLM is told in the service of a tuned model: what `gemsmith serve --on` would tell it on such a machine."""

from collections.abc import Iterator, Sequence

from gemsmith.launch.target import MOUNT, Chosen, Request
from gemsmith.serve.deployment import Deployment
from gemsmith.serve.engine import ServeSettings
from gemsmith.serve.machines import PROMPT_AND_OUTPUT, Weights, deploy, published_config

PORT = 8000


def deploy_service(request: Request) -> Deployment:
    """The deployment of the merged weights in the run's bucket, which is mounted at MOUNT."""
    serve, data = request.recipe.serve, request.recipe.data
    needed = serve.max_model_len or 0
    folder = f"{MOUNT}/{request.root.removeprefix(f'gs://{request.bucket}/')}"
    settings = ServeSettings(
        host="0.0.0.0",
        port=PORT,
        # What eval and bench need is little for others to ask with, unless it is more than what is given by default.
        max_model_len=request.max_model_len or (needed if needed > PROMPT_AND_OUTPUT else None),
        dtype=serve.dtype,
        seed=request.recipe.seed,
        prefix_caching=True,
        chat_template=f"{folder}/launched/{data.template}" if data.template else None,
        arguments=serve.arguments,
        pictures=serve.pictures or bool(request.pictures),
        image_tokens=data.image_tokens,
        kv_cache_dtype=serve.kv_cache_dtype,
        image=serve.image,
    )
    weights = Weights(
        source=f"{folder}/run/merged",
        is_folder=True,
        variant=request.variant,
        config=published_config(request.variant),
    )
    # Cloud Run asks who calls before vLLM sees the call, so the server needs no key.
    return deploy(request.machine, weights, settings, name=request.name, keyed=True)


def service_arguments(deployment: Deployment) -> list[str | Chosen]:
    """Its arguments, an option with its value each, and the reasons of those that were chosen."""
    there = {mount.inside: mount.host for mount in deployment.mounts}
    words = [there.get(word, word) for word in deployment.arguments]
    reasons = {choice.what.partition(" ")[0]: choice.why for choice in deployment.choices}
    reasons["--gpu-memory-utilization"] = reasons["memory"]
    return [
        Chosen(argument, reasons[option]) if (option := argument.partition("=")[0]) in reasons else argument
        for argument in _joined(words)
    ]


def _joined(words: Sequence[str]) -> Iterator[str]:
    """["a", "--b", "c", "--d"] -> "a", "--b=c", "--d"."""
    left = [*words]
    while left:
        word = left.pop(0)
        value = word.startswith("--") and "=" not in word and left and not left[0].startswith("--")
        yield f"{word}={left.pop(0)}" if value else word
