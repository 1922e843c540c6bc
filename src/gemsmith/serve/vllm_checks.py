"""What is refused, added or said where a deployment would run into a fault of vLLM (vllm_issues)."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gemsmith.arch import Variant
from gemsmith.checkpoints.peft_config import PeftConfig
from gemsmith.errors import CheckpointError, MachineError, RecipeError
from gemsmith.hardware import Machine
from gemsmith.serve.container import DeploymentChoice, choose_option
from gemsmith.serve.settings import ServeSettings, VllmEnvironment
from gemsmith.serve.vllm_issues import CAUSAL_IMAGES_ON_CPU, MM_BUDGET, NO_STREAMER, TPU_ISSUES, TRANSFORMERS_5_15

IMAGE_TOKENS = 2496  # of Gemma 4's largest image (vLLM #42687)
BATCHED_TOKENS = 4096  # the least that vLLM's own recipes give where an image must fit
WARNING = "warning"  # what a DeploymentChoice is called that warns
TPU_IMAGE = "vllm/vllm-tpu:gemma4"
_NO_DOMAIN = "none.invalid"  # RFC 2606: a name that nobody has
_PAPER, _RECIPES = "https://arxiv.org/abs/2605.25645", "https://github.com/AI-Hypercomputer/tpu-recipes"
Place = Literal["folder", "bucket", "hub"]  # where weights lie


def read_version(text: str) -> tuple[int, ...] | None:
    """A version, or an image's tag, as numbers; None where it is none.

    >>> [read_version(text) for text in ("0.32.0+cpu", "vllm/vllm-openai:v0.27.1", "vllm/vllm-tpu:gemma4")]
    [(0, 32, 0), (0, 27, 1), None]
    """
    found = re.match(r"v?(\d+(?:\.\d+)+)", text.rpartition(":")[2])
    return tuple(int(part) for part in found[1].split(".")) if found else None


def refuse_image(image: str, *, streams: bool = False) -> None:
    """Raises RecipeError for an image that cannot start a Gemma 4, or cannot stream its weights where it must."""
    version = read_version(image)
    if streams and version is not None and NO_STREAMER.affects(version):
        raise RecipeError(
            f"serve.container_image: {image} is older than vLLM 0.11.1 and cannot stream weights from a bucket "
            f"({NO_STREAMER.link}); take a later one, or --load mount"
        )
    if version is not None and TRANSFORMERS_5_15.affects(version):
        raise RecipeError(
            f"serve.container_image: {image} has transformers 5.15, with which vLLM 0.27 dies at the start of a Gemma "
            f"4 ({TRANSFORMERS_5_15.link}); take 0.28 or later"
        )


def refuse_engine(engine: VllmEnvironment) -> None:
    """Raises MachineError for an environment whose vLLM cannot start a Gemma 4."""
    version, transformers = read_version(engine.version), read_version(engine.transformers)
    if version and transformers and TRANSFORMERS_5_15.affects(version) and transformers >= (5, 15):
        raise MachineError(
            f"serve.python: {engine.python} has vLLM {engine.version} with transformers {engine.transformers}, and "
            f"dies at the start of a Gemma 4 ({TRANSFORMERS_5_15.link}); install vLLM 0.28 or later there, or "
            "transformers below 5.15"
        )


def image_budget(
    variant: Variant, settings: ServeSettings, *, takes_images: bool, version: tuple[int, ...] | None
) -> DeploymentChoice | None:
    """What lets one image fit into a batch; None where vLLM sees to it. Raises RecipeError where nothing does."""
    if not takes_images or not variant.bidirectional_images:
        return None
    given = option_value(settings.arguments, "--max-num-batched-tokens")
    if given is not None and given.isdecimal() and int(given) < IMAGE_TOKENS:
        raise RecipeError(
            f"serve.arguments: --max-num-batched-tokens {given} is less than one image of {IMAGE_TOKENS} "
            f"tokens, and vLLM would die at start ({MM_BUDGET.link}); set {BATCHED_TOKENS}"
        )
    if given is not None or not MM_BUDGET.affects(version):
        return None
    why = f"an image has up to {IMAGE_TOKENS} tokens and is not cut; vLLM may batch fewer, and die ({MM_BUDGET.link})"
    return choose_option("--max-num-batched-tokens", str(BATCHED_TOKENS), why=why)


def encoder_arguments(config: Mapping[str, Any], settings: ServeSettings, *, is_cpu: bool) -> list[str]:
    """What leaves the encoders out, or sets soft tokens as in training. Raises CheckpointError without an encoder."""
    if not settings.images:
        if not any("ConditionalGeneration" in name for name in config.get("architectures") or ()):
            return []
        if is_cpu or not config.get("vision_config"):
            # The text class reads the same tensor names and skips the encoders' (models/gemma4.py, 0.32.0).
            return ["--hf-overrides", json.dumps({"architectures": ["Gemma4ForCausalLM"]})]
        return ["--language-model-only"]
    if not config.get("vision_config"):
        raise CheckpointError(
            "serve: images were to be taken, but the checkpoint's config.json has no vision_config, so it takes text "
            "alone; set serve.images to false, or give a checkpoint that takes images"
        )
    return [
        *("--limit-mm-per-prompt", json.dumps({"video": 0, "audio": 0})),
        *("--mm-processor-kwargs", json.dumps({"max_soft_tokens": settings.image_tokens})),
        # vLLM would fetch whatever URL a client names; files it does not read unless it is told a folder.
        *("--allowed-media-domains", _NO_DOMAIN),
    ]


def refuse_on_cpu(variant: Variant) -> None:
    """Raises RecipeError for images of a model that vLLM runs otherwise on a CPU than it was trained."""
    if variant.bidirectional_images:
        raise RecipeError(
            f"serve: {variant.name} with images was to be served on a CPU, where vLLM does not let an image's "
            f"tokens see each other as training does ({CAUSAL_IMAGES_ON_CPU}); serve it on a GPU or TPU; on a CPU "
            "images go with gemma4-e2b and gemma4-e4b"
        )


def refuse_vision(config: PeftConfig) -> None:
    """Raises RecipeError for an adapter of which vLLM would leave out a part, those of what encodes images.

    It takes that part with --enable-tower-connector-lora, which has not been tried here
    (https://github.com/vllm-project/vllm/pull/42662).
    """
    if any(name in str(config.target_modules) for name in ("vision_tower", "embed_vision")):
        raise RecipeError(
            "serve.weights: adapter was given, but the run's adapter is also on what encodes images, and vLLM leaves "
            "that part out; set merged"
        )


def tpu_warnings(
    machine: Machine, variant: Variant, settings: ServeSettings, weight_dtype: str, *, in_image: bool, place: Place
) -> tuple[DeploymentChoice, ...]:
    """What went wrong, or otherwise than one would think, with such a model on such a TPU; none elsewhere."""
    if machine.chip.kind != "tpu":
        return ()
    name, chip, image = variant.name, machine.chip.name, settings.container_image or TPU_IMAGE
    kv = option_value(settings.arguments, "--kv-cache-dtype") or settings.kv_cache_dtype
    lacks_memory = (name, machine.name, weight_dtype) == ("gemma4-31b", "v6e-4", "bfloat16")
    fp8_kv = "kv_cache_dtype auto was fp8_e5m2 on a v6e-8; --kv-cache-dtype in serve.arguments names it"
    folder = "vLLM's image for TPUs refused a local folder, and took a hub id alone"
    stream = "no stream of weights into a TPU was tried here; vLLM's images for TPUs have it of late"
    memory = "the 31B ran out of memory there in bfloat16, and ran with weights and KV in fp8"
    old = f"{image} is vLLM 0.19.0, whose vulnerabilities later ones mend; serve.container_image names one of those"
    seen = (
        (in_image and image == TPU_IMAGE, old, _PAPER),
        (place == "bucket", stream, "https://github.com/vllm-project/tpu-inference/pull/1356"),
        (place == "folder", folder, f"{_PAPER}, its notes"),
        (kv == "auto", fp8_kv, _PAPER),
        (name in ("gemma4-e2b", "gemma4-e4b"), f"Google's recipes for TPUs call {name} not verified", _RECIPES),
        (lacks_memory, memory, f"{TPU_ISSUES}2333"),
        (name == "gemma4-26b-a4b" and chip == "v5e", "the 26B-A4B could not be run there", f"{TPU_ISSUES}2453"),
    )
    return tuple(DeploymentChoice(WARNING, f"{why} ({link})") for holds, why, link in seen if holds)


def option_value(words: Sequence[str], option: str) -> str | None:
    """What the last of an option's mentions gives it; None where it does not exist.

    >>> option_value(("--a-b", "1", "--a_b=2"), "--a-b")
    '2'
    """
    found = None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            found = value if equals else next(iter(words[place + 1 : place + 2]), "")
    return found
