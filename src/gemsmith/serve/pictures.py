"""What vLLM is told so that it takes pictures as training did; and where it cannot."""

import json
from collections.abc import Mapping
from typing import Any

from gemsmith.checkpoint.folder import name_variant
from gemsmith.errors import CheckpointError, MachineError, RecipeError
from gemsmith.serve.engine import Engine, ServeSettings
from gemsmith.serve.upstream import CAUSAL_PICTURES_ON_CPU, text_only
from gemsmith.zoo import Variant, read_variant

"""Put on vLLM's PYTHONPATH on a CPU, for torchvision."""
_NO_DOMAIN = "none.invalid"  # RFC 2606: a name that nobody has


def encoder_arguments(config: Mapping[str, Any], settings: ServeSettings, *, is_cpu: bool) -> list[str]:
    """Arguments that leave the encoders out, or give a picture as many soft tokens as in training.

    Raises CheckpointError where pictures are wanted of a model that takes none.
    """
    if not settings.pictures:
        return text_only(config, is_cpu=is_cpu)
    if not config.get("vision_config"):
        raise CheckpointError(
            "serve: pictures were to be taken, but the checkpoint's config.json has no vision_config, so it takes text "
            "alone; set serve.pictures to false, or give a checkpoint that takes pictures"
        )
    return [
        *("--limit-mm-per-prompt", json.dumps({"video": 0, "audio": 0})),
        *("--mm-processor-kwargs", json.dumps({"max_soft_tokens": settings.image_tokens})),
        # vLLM would fetch whatever URL a client names; files it does not read unless it is told a folder.
        *("--allowed-media-domains", _NO_DOMAIN),
    ]


def refuse_on_cpu(variant: Variant) -> None:
    """Raises RecipeError for pictures of a model that vLLM runs otherwise on a CPU than it was trained."""
    if variant.bidirectional_images:
        raise RecipeError(
            f"serve: {variant.name} with pictures was to be served on a CPU, where vLLM does not let a picture's "
            f"tokens see each other as training does ({CAUSAL_PICTURES_ON_CPU}); serve it on a GPU or TPU; on a CPU "
            "pictures go with gemma4-e2b and gemma4-e4b"
        )


def refuse_engine_without_torchvision(engine: Engine, config: Mapping[str, Any]) -> None:
    """Raises MachineError where pictures are to be taken on a CPU and torchvision is missing, and as refuse_on_cpu."""
    if not engine.is_cpu:
        return
    refuse_on_cpu(name_variant(read_variant(dict(config))))
    if not engine.torchvision:
        raise MachineError(
            f"serve.python: {engine.python} has no torchvision, which pictures need; make it again with: rm -r "
            ".venv-serve && make serve-env, or install there the torchvision that goes with its torch, with --no-deps"
        )
