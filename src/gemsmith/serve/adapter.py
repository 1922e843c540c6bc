"""Base and tuned model as two names of one server: vLLM's arguments for a LoRA adapter."""

from dataclasses import dataclass

from gemsmith.checkpoint.peft_config import PeftConfig
from gemsmith.errors import RecipeError
from gemsmith.serve.upstream import SPARE_ADAPTER_ON_CPU

# vLLM takes adapters up to one of these ranks.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, kw_only=True)
class ServedAdapter:
    """A PEFT folder, as the server sees it, and the rank in it."""

    folder: str
    rank: int


def refuse_vision(config: PeftConfig) -> None:
    """Raises RecipeError for an adapter of which vLLM would leave out a part, those of what encodes pictures.

    It takes that part with --enable-tower-connector-lora, which has not been tried here
    (https://github.com/vllm-project/vllm/pull/42662).
    """
    targets = str(config.values.get("target_modules"))
    if any(name in targets for name in ("vision_tower", "embed_vision")):
        raise RecipeError(
            "serve.weights: adapter was given, but the run's adapter is also on what encodes pictures, and vLLM leaves "
            "that part out; set merged"
        )


def lora_arguments(adapter: ServedAdapter, name: str, *, is_cpu: bool) -> list[str]:
    """Arguments that serve an adapter under a name, beside the base under its own."""
    spare = SPARE_ADAPTER_ON_CPU if is_cpu else ()
    rank = next((rank for rank in _RANKS if rank >= adapter.rank), adapter.rank)
    return ["--enable-lora", *spare, "--max-lora-rank", str(rank), "--lora-modules", f"{name}={adapter.folder}"]


def base_name(name: str) -> str:
    """What the base is called beside a tuned model of that name."""
    return f"{name}-base"


def served_name(name: str, adapter: ServedAdapter | None) -> str:
    """What a server calls the weights that it loads, where the tuned model has that name."""
    return name if adapter is None else base_name(name)
