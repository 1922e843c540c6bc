"""The deployment of a model on a machine of the catalog: one pure function, each choice with its reason.

Nothing here has run on a TPU yet, and nothing on several GPUs: what fits is estimated by
gemsmith.hardware.model.serving.

What vLLM's OpenAI server is told, wherever it runs; and its command line on this machine as it is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from gemsmith.arch import Variant, read_variant
from gemsmith.checkpoints import read_config
from gemsmith.checkpoints.folder import name_variant
from gemsmith.errors import RecipeError
from gemsmith.hardware import Machine
from gemsmith.hardware.model.serving import serving_memory
from gemsmith.serve.container import Choice, Deployment, Mount, as_command, refuse_open_server
from gemsmith.serve.parallelism import BATCHED, UTILISATION, Split, choose_split, memory_choice, tensor_parallel_choice
from gemsmith.serve.settings import (
    KEY_VARIABLE,
    ServedAdapter,
    ServeSettings,
    VllmEnvironment,
    clean_environment,
    encoder_arguments,
    has_key,
    lora_arguments,
    refuse_engine_without_torchvision,
    refuse_on_cpu,
    served_name,
)
from gemsmith.serve.vllm_checks import (
    TPU_CACHE,
    TPU_IMAGE,
    WARNING,
    Version,
    adapter_choice,
    attention_choice,
    image_budget,
    read_version,
    refuse_image,
    tpu_warnings,
)
from gemsmith.serve.vllm_issues import (
    CONTENT_AS_TEXT,
    CONTENT_IN_PARTS,
    IMAGES_EMBEDDED_ANEW,
    QUICK_START_ON_CPU,
    SERVER_MODULE,
    cpu_environment,
)
from gemsmith.system.console import open_console


def server_command(engine: VllmEnvironment, folder: Path, name: str, port: int, settings: ServeSettings) -> list[str]:
    """The command line of vLLM's OpenAI server for a checkpoint folder, on this machine as it is.

    Raises RecipeError, CheckpointError or MachineError where images are wanted and cannot be had.
    """
    config = read_config(folder)
    if settings.images:
        refuse_engine_without_torchvision(engine, config)
    command = [str(engine.python), "-m", SERVER_MODULE, "--model", str(folder)]
    command += common_arguments(served_name(name, settings.adapter), settings, port=port, length=settings.max_model_len)
    if settings.chat_template is not None:
        command += ["--chat-template", settings.chat_template]
    if engine.is_cpu:
        command += QUICK_START_ON_CPU
    command += encoder_arguments(config, settings, is_cpu=engine.is_cpu)
    if settings.adapter is not None:
        command += lora_arguments(settings.adapter, name, is_cpu=engine.is_cpu)
    return [*command, *settings.arguments]


def common_arguments(name: str, settings: ServeSettings, *, port: int, length: int | None) -> list[str]:
    """What every server is told, wherever it is."""
    arguments = ["--served-model-name", name, "--host", settings.host, "--port", str(port)]
    arguments += [
        "--dtype",
        settings.dtype,
        "--seed",
        str(settings.seed),
        *(CONTENT_IN_PARTS if settings.images else CONTENT_AS_TEXT),
    ]
    arguments += ["--uvicorn-log-level", "warning"]
    arguments += [f"--{'' if settings.prefix_caching else 'no-'}enable-prefix-caching"]
    if settings.images and not settings.prefix_caching:
        # Without either cache vLLM knows a image by its request alone, and embeds it anew.
        arguments += IMAGES_EMBEDDED_ANEW
    return arguments if length is None else [*arguments, "--max-model-len", str(length)]


GPU_IMAGE = "vllm/vllm-openai:v0.32.0"
"""The version whose build for CPUs Gemsmith's tests serve with."""
RUNTIMES = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
"""The image of a TPU VM, by chip; another boots and cannot be reached."""
PORT = 8000
PROMPT_AND_OUTPUT = 16_384 + 1_024
"""Tokens, where nothing says what will be asked: a prompt of 16,384 needs more than 16,384 with its output."""
_FP8_BY_QWIX = {"quantization": {"qwix": {
    # Quantized while it is loaded: the whole in bfloat16 would have to fit first.
    "use_abstract_model": True,
    "rules": [{"module_path": ".*", "weight_qtype": "float8_e4m3fn"}],
}}}  # fmt: skip
_HUB_CACHE = "~/.cache/huggingface"
_XLA_CACHE, _XLA_CACHE_INSIDE = "~/.cache/gemsmith/xla", "/xla-cache"
_MODEL_INSIDE, _ADAPTER_INSIDE, _TEMPLATE_INSIDE = "/model", "/adapter", "/chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a server loads."""

    source: str
    """A folder, absolute or seen from the working directory, or a Hugging Face hub id."""
    is_folder: bool
    variant: Variant
    config: Mapping[str, Any]
    """config.json, or as much of the published one's as matters here."""
    adapter: ServedAdapter | None = None


_Arguments = tuple[list[str], tuple[Choice, ...]]


def published_config(variant: Variant) -> dict[str, Any]:
    """As much of the published checkpoints' config.json as decides how they are served."""
    unified = "Unified" if variant.model_type == "gemma4_unified" else ""
    seeing = {"vision_config": {"model_type": "vision"}} if variant.vision else {}
    return {"architectures": [f"Gemma4{unified}ForConditionalGeneration"], **seeing}


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Where the server finds what it loads: here, or in a container."""

    model: str
    template: str | None
    adapter: ServedAdapter | None
    mounts: tuple[Mount, ...] = ()

    @classmethod
    def here(cls, weights: Weights, settings: ServeSettings) -> "_Seen":
        return cls(model=weights.source, template=settings.chat_template, adapter=weights.adapter)

    @classmethod
    def in_image(cls, weights: Weights, settings: ServeSettings) -> "_Seen":
        mounts, model, template, adapter = [], weights.source, settings.chat_template, weights.adapter
        if weights.is_folder:
            mounts.append(Mount(host=model, inside=_MODEL_INSIDE))
            model = _MODEL_INSIDE
        if template is not None:
            mounts.append(Mount(host=template, inside=_TEMPLATE_INSIDE))
            template = _TEMPLATE_INSIDE
        if adapter is not None:
            mounts.append(Mount(host=adapter.folder, inside=_ADAPTER_INSIDE))
            adapter = replace(adapter, folder=_ADAPTER_INSIDE)
        return cls(model=model, template=template, adapter=adapter, mounts=tuple(mounts))


def deploy(
    machine: Machine,
    weights: Weights,
    settings: ServeSettings,
    *,
    name: str,
    program: tuple[str, ...] = (),
    keyed: bool = False,
) -> Deployment:
    """The deployment on a machine: in Docker, or where `program` is given (Python, -m, module), with that.

    `keyed`: a key for clients is in the environment.

    Raises RecipeError where settings do not go with the machine, MachineError where the model does not fit on it.
    """
    refuse_open_server(settings, has_key=keyed)
    kind, image = machine.chip.kind, None
    if not program:
        image = image_of(machine, settings)
        refuse_image(image)
    length = settings.max_model_len or min(PROMPT_AND_OUTPUT, weights.variant.context)
    arguments, choices = _arguments_on(machine, weights, settings, length, image)
    seen = _Seen.in_image(weights, settings) if image else _Seen.here(weights, settings)
    return Deployment(
        machine=machine.name,
        image=image,
        runtime=RUNTIMES.get(machine.chip.name) if kind == "tpu" and image else None,
        program=("serve",) if image else program,
        docker_flags=_docker_flags(kind) if image else (),
        environment=_environment(kind, weights, in_image=image is not None),
        passed=(*((KEY_VARIABLE,) if keyed else ()), *(() if weights.is_folder else ("HF_TOKEN",))),
        mounts=(*seen.mounts, *_caches(kind, weights)) if image else (),
        arguments=(
            *((seen.model,) if image else ("--model", seen.model)),
            *common_arguments(served_name(name, weights.adapter), settings, port=settings.port or PORT, length=length),
            *(("--chat-template", seen.template) if seen.template else ()),
            *arguments,
            *(lora_arguments(seen.adapter, name, is_cpu=kind == "cpu") if seen.adapter else ()),
            *settings.arguments,
        ),
        host=settings.host,
        port=settings.port or PORT,
        choices=(*_image_choice(image, kind), _length_choice(settings, length), *choices),
    )


def image_engine(settings: ServeSettings) -> VllmEnvironment:
    """The vLLM of an image, which runs no Python of this machine; its version is what it says of itself."""
    assert settings.machine is not None
    return VllmEnvironment(python=Path("docker"), package=image_of(settings.machine, settings), version="")


def image_of(machine: Machine, settings: ServeSettings) -> str:
    """The image that serves on a machine."""
    return settings.image or (TPU_IMAGE if machine.chip.kind == "tpu" else GPU_IMAGE)


def deployed_command(
    engine: VllmEnvironment, folder: Path, name: str, port: int, settings: ServeSettings, *, container: str
) -> tuple[list[str], dict[str, str]]:
    """The command line that serves a folder on settings.machine, which this is, and its environment."""
    assert settings.machine is not None
    config = read_config(folder)
    weights = Weights(
        source=settings.hub_id or str(folder.absolute()),
        is_folder=settings.hub_id is None,
        variant=name_variant(read_variant(config)),
        config=config,
        adapter=settings.adapter,
    )
    program = () if settings.in_docker else (str(engine.python), "-m", SERVER_MODULE)
    deployment = deploy(
        settings.machine, weights, replace(settings, port=port), name=name, program=program, keyed=has_key()
    )
    for choice in deployment.choices:
        if choice.what == WARNING:
            open_console().print(Text.assemble((f"{WARNING}: ", "yellow"), choice.why))
    if settings.in_docker:
        return as_command(deployment, container=container), clean_environment()
    return as_command(deployment), clean_environment() | dict(deployment.environment)


def _arguments_on(
    machine: Machine, weights: Weights, settings: ServeSettings, length: int, image: str | None
) -> _Arguments:
    """What the kind of machine decides, and why."""
    kind = machine.chip.kind
    if kind == "cpu":
        arguments, choices = _on_cpu(machine, weights, settings)
    else:
        split = choose_split(machine, weights.variant, settings, length)
        on = _on_gpu if kind == "gpu" else _on_tpu
        arguments, choices = on(machine, weights, settings, split, read_version(image or ""))
        found = {"in_image": image is not None, "is_folder": weights.is_folder}
        choices = (*choices, *tpu_warnings(machine, weights.variant, settings, split.weight_dtype, **found))
    return arguments, choices if weights.adapter is None else (*choices, adapter_choice(kind))


def _on_cpu(machine: Machine, weights: Weights, settings: ServeSettings) -> _Arguments:
    """One process."""
    if settings.images:
        refuse_on_cpu(weights.variant)
    if settings.kv_cache_dtype != "auto":
        raise RecipeError(f"serve.kv_cache_dtype: {settings.kv_cache_dtype} was given; on a CPU set auto")
    dtype = "float32" if settings.dtype == "float32" else "bfloat16"
    needed = serving_memory(weights.variant, tp=1, max_model_len=1, weight_dtype=dtype).weights
    choices = [Choice(what="--enforce-eager", why="compiling takes longer than it saves in a short life on a CPU")]
    if needed > machine.chip.hbm_bytes:
        why = f"the weights are {needed / 1e9:.0f} GB, this machine has {machine.chip.hbm_bytes / 1e9:.0f}: too little"
        choices.append(Choice(what="memory", why=why))
    return [*QUICK_START_ON_CPU, *encoder_arguments(weights.config, settings, is_cpu=True)], tuple(choices)


def _on_gpu(
    machine: Machine, weights: Weights, settings: ServeSettings, split: Split, version: Version | None
) -> _Arguments:
    arguments = ["--tensor-parallel-size", str(split.tp)]
    choices = [tensor_parallel_choice(machine, weights.variant, split)]
    if split.copies > 1:
        arguments += ["--data-parallel-size", str(split.copies)]
        why = f"{machine.devices} GPUs hold {split.copies} copies of the weights, behind one address"
        choices.append(Choice(what=f"--data-parallel-size {split.copies}", why=why))
    arguments += ["--gpu-memory-utilization", f"{UTILISATION:.2f}"]
    choices.append(memory_choice(machine, split))
    if split.weight_dtype == "fp8":
        arguments += ["--quantization", "fp8"]
        choices.append(
            _fp8_choice(
                machine, "--quantization fp8", "in bfloat16 they do not fit; vLLM makes them as they are loaded"
            )
        )
    takes_images = settings.images and bool(weights.config.get("vision_config"))
    budget, why_budget = image_budget(weights.variant, settings, takes_images=takes_images, version=version)
    if split.batched_tokens != BATCHED[0] and not budget:
        budget = ("--max-num-batched-tokens", str(split.batched_tokens))
        why = f"with {BATCHED[0]} the sliding windows' keys and values would not fit beside the weights"
        why_budget = (Choice(what=" ".join(budget), why=why),)
    encoder = encoder_arguments(weights.config, settings, is_cpu=False)
    arguments += encoder
    choices += _image_choices(settings, encoder)
    if settings.kv_cache_dtype != "auto":
        arguments += ["--kv-cache-dtype", settings.kv_cache_dtype]
        choices.append(Choice(what="--kv-cache-dtype fp8", why="serve.kv_cache_dtype; e4m3 on a GPU"))
    return [*arguments, *budget], (*choices, *why_budget, *attention_choice(weights.variant, version))


def _on_tpu(
    machine: Machine, weights: Weights, settings: ServeSettings, split: Split, version: Version | None
) -> _Arguments:
    arguments, choices = (
        ["--tensor-parallel-size", str(split.tp)],
        [tensor_parallel_choice(machine, weights.variant, split)],
    )
    choices.append(memory_choice(machine, split))
    if split.weight_dtype == "fp8":
        arguments += ["--additional-config", json.dumps(_FP8_BY_QWIX)]
        choices.append(
            _fp8_choice(
                machine,
                "--additional-config",
                "in bfloat16 they do not fit; Qwix makes them while they load, which tpu-inference calls deprecated",
            )
        )
    budget, why_budget = image_budget(weights.variant, settings, takes_images=True, version=version)
    why = "a image's tokens attend to each other, so it is not cut into chunks"
    choices.append(Choice(what="--disable_chunked_mm_input", why=why))
    if settings.images:
        encoder = encoder_arguments(weights.config, settings, is_cpu=False)
        arguments += encoder
        choices += _image_choices(settings, encoder)
    else:
        why = "is false, and images are taken all the same: no switch is known to leave their encoder out on a TPU"
        choices.append(Choice(what="serve.images", why=why))
    if settings.kv_cache_dtype != "auto":
        dtype = "fp8_e5m2" if machine.chip.name == "v6e" else "fp8"
        arguments += ["--kv-cache-dtype", dtype]
        why = "serve.kv_cache_dtype; on a v6e fp8 keys and values are e5m2, on a GPU e4m3"
        choices.append(Choice(what=f"--kv-cache-dtype {dtype}", why=why))
    why = f"the first start compiles for 8 to 10 minutes, others take that from the folder ({TPU_CACHE.link})"
    choices.append(Choice(what=f"VLLM_XLA_CACHE_PATH, {_XLA_CACHE}", why=f"{why}; a bucket would not do"))
    return [*arguments, "--disable_chunked_mm_input", *budget], (*choices, *why_budget)


def _image_choices(settings: ServeSettings, arguments: Sequence[str]) -> list[Choice]:
    """Why the encoders are left out, or told what they are."""
    if not settings.images:
        return [Choice(what=word, why="serve.images is false") for word in arguments[:1]]
    return [
        Choice(what=" ".join(arguments[:2]), why="images alone; their number is limited by --max-model-len"),
        Choice(what=" ".join(arguments[2:4]), why="data.image_tokens: as many soft tokens as a image was trained with"),
        Choice(what=" ".join(arguments[4:]), why="images come in the request as data: URLs; the server fetches none"),
    ]


def _fp8_choice(machine: Machine, what: str, why: str) -> Choice:
    slow = (
        "; its matmuls are of bfloat16, so this saves memory alone"
        if machine.chip.name in ("v5e", "v5p", "v6e")
        else ""
    )
    return Choice(what=what, why=f"weights in fp8: {why}{slow}")


def _length_choice(settings: ServeSettings, length: int) -> Choice:
    given = "serve.max_model_len: a prompt and its output together"
    return Choice(
        what=f"--max-model-len {length}",
        why=given
        if settings.max_model_len
        else "a prompt of 16,384 tokens and 1,024 of output, or what the model reads",
    )


def _image_choice(image: str | None, kind: str) -> tuple[Choice, ...]:
    if image is None:
        return ()
    shared = (
        Choice(what="--privileged, --shm-size 16G, /dev/shm", why="libtpu needs the chips and shared memory")
        if kind == "tpu"
        else Choice(what="--ipc host", why="GPUs exchange through shared memory")
    )
    return (
        Choice(what=image, why="vLLM's own image; serve.container_image names another"),
        shared,
        Choice(what="--network host", why="vLLM itself listens on serve.host then, and nowhere else"),
    )


def _docker_flags(kind: str) -> tuple[str, ...]:
    if kind == "tpu":
        return ("--privileged", "--network", "host", "--shm-size", "16G", "--entrypoint", "vllm")
    return ("--gpus", "all", "--ipc", "host", "--network", "host", "--entrypoint", "vllm")


def _caches(kind: str, weights: Weights) -> tuple[Mount, ...]:
    mounts = [] if weights.is_folder else [Mount(host=_HUB_CACHE, inside="/root/.cache/huggingface", writable=True)]
    if kind == "tpu":
        mounts += [Mount(host="/dev/shm", inside="/dev/shm", writable=True)]
        mounts += [Mount(host=_XLA_CACHE, inside=_XLA_CACHE_INSIDE, writable=True)]
    return tuple(mounts)


def _environment(kind: str, weights: Weights, *, in_image: bool) -> dict[str, str]:
    found = {"HF_HUB_OFFLINE": "1"} if weights.is_folder else {}
    found |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if kind == "cpu":
        return cpu_environment() | found
    return found | ({"VLLM_XLA_CACHE_PATH": _XLA_CACHE_INSIDE} if kind == "tpu" and in_image else {})
