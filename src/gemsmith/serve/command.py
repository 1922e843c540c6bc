"""vLLM's command line: on this machine as it is, or deployed on one of the catalog, each choice with its reason.

Nothing here has run on a TPU yet, and nothing on several GPUs: what fits is estimated (hardware.model.serving).
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemsmith.arch import Variant, read_variant
from gemsmith.checkpoints.folder import name_variant, read_config
from gemsmith.errors import MachineError, RecipeError
from gemsmith.hardware import Machine
from gemsmith.hardware.model.limits import allowed_tp
from gemsmith.hardware.model.serving import ServingMemory, serving_memory
from gemsmith.serve import vllm_checks, vllm_issues
from gemsmith.serve.container import Deployment, DeploymentChoice, Mount, as_command, choose_option, refuse_open_server
from gemsmith.serve.settings import (
    KEY_VARIABLE,
    ServeSettings,
    VllmEnvironment,
    api_headers,
    base_name,
    clean_environment,
    server_environment,
)

GPU_IMAGE = "vllm/vllm-openai:v0.32.0"  # the version whose build for CPUs Gemsmith's tests serve with
RUNTIMES = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
"""The image of a TPU VM, by chip; another boots and cannot be reached."""
PORT = 8000
PROMPT_AND_OUTPUT = 16_384 + 1_024
"""Tokens, where nothing says what will be asked: a prompt of 16,384 needs more than 16,384 with its output."""
UTILIZATION = 0.90  # the share of a device's memory that vLLM may take
BATCHED = (8192, 4096)
"""Tokens of a forward pass to try: vLLM's default on large GPUs, and half, which leaves more to keys and values."""
_FP8_BY_QWIX = {"quantization": {"qwix": {
    # Quantized while it is loaded: the whole in bfloat16 would have to fit first.
    "use_abstract_model": True,
    "rules": [{"module_path": ".*", "weight_qtype": "float8_e4m3fn"}],
}}}  # fmt: skip
_HUB_CACHE = Mount(host="~/.cache/huggingface", inside="/root/.cache/huggingface", writable=True)
_SHARED_MEMORY = Mount(host="/dev/shm", inside="/dev/shm", writable=True)
_XLA_CACHE = Mount(host="~/.cache/gemsmith/xla", inside="/xla-cache", writable=True)
_MODEL_INSIDE, _ADAPTER_INSIDE, _TEMPLATE_INSIDE = "/model", "/adapter", "/chat_template.jinja"
_DOCKER_FLAGS = {
    "tpu": ("--privileged", "--network", "host", "--shm-size", "16G", "--entrypoint", "vllm"),
    "gpu": ("--gpus", "all", "--ipc", "host", "--network", "host", "--entrypoint", "vllm"),
}
_SHARED = {
    "tpu": DeploymentChoice("--privileged, --shm-size 16G, /dev/shm", "libtpu needs the chips and shared memory"),
    "gpu": DeploymentChoice("--ipc host", "GPUs exchange through shared memory"),
}
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def max_lora_rank(rank: int) -> int:
    """The smallest of vLLM's bounds that takes an adapter of this rank."""
    return next((bound for bound in _RANKS if bound >= rank), rank)


@dataclass(frozen=True, kw_only=True)
class Weights:
    source: str  # a folder, absolute or seen from the working directory, or in a bucket; or a Hugging Face hub id
    is_folder: bool
    variant: Variant
    config: Mapping[str, Any]  # config.json, or as much of the published one's as matters here

    @property
    def place(self) -> vllm_checks.Place:
        """Where they lie; out of a bucket vLLM streams them."""
        return "bucket" if self.source.startswith("gs://") else "folder" if self.is_folder else "hub"


@dataclass(frozen=True, kw_only=True)
class Layout:
    tp: int
    copies: int  # servers' workers that have all the weights, each on `tp` devices
    weight_dtype: str
    batched_tokens: int
    memory: ServingMemory


def published_config(variant: Variant) -> dict[str, Any]:
    """As much of the published checkpoints' config.json as decides how they are served."""
    unified = "Unified" if variant.model_type == "gemma4_unified" else ""
    seeing = {"vision_config": {"model_type": "vision"}} if variant.vision else {}
    return {"architectures": [f"Gemma4{unified}ForConditionalGeneration"], **seeing}


def server_command(
    engine: VllmEnvironment, folder: Path, name: str, settings: ServeSettings, *, container: str = ""
) -> tuple[list[str], dict[str, str]]:
    """The command line of vLLM's OpenAI server for a checkpoint folder, and its environment; `container` names it.

    Raises RecipeError, CheckpointError or MachineError where images are wanted and cannot be had, and as `deploy`.
    """
    config, is_cpu = read_config(folder), engine.is_cpu
    program = () if settings.in_docker else (str(engine.python), "-m", vllm_issues.SERVER_MODULE)
    if settings.machine is None:
        if settings.images and is_cpu:
            vllm_checks.refuse_on_cpu(name_variant(read_variant(config)))
            if not engine.torchvision:
                raise MachineError(
                    f"serve.python: {engine.python} has no torchvision, which images need; make it again with: rm -r "
                    ".venv-serve && make serve-env, or install there the torchvision that goes with its torch, with "
                    "--no-deps"
                )
        here = vllm_issues.QUICK_START_ON_CPU if is_cpu else ()
        here = (*here, *vllm_checks.encoder_arguments(config, settings, is_cpu=is_cpu))
        told = _server_arguments(name, settings, here, is_cpu=is_cpu)
        return [*program, "--model", str(folder), *told], server_environment(engine)
    source, variant = settings.hub_id or str(folder.absolute()), name_variant(read_variant(config))
    weights = Weights(source=source, is_folder=settings.hub_id is None, variant=variant, config=config)
    deployment = deploy(settings.machine, weights, settings, name=name, program=program, keyed=bool(api_headers()))
    from gemsmith.system.console import print_warnings  # here: planning needs no terminal

    print_warnings("serve", (choice.why for choice in deployment.choices if choice.what == vllm_checks.WARNING))
    environment = {} if settings.in_docker else dict(deployment.environment)
    return as_command(deployment, container=container), clean_environment() | environment


def deploy(
    machine: Machine, weights: Weights, settings: ServeSettings, *, name: str, program: Sequence[str] = (), keyed: bool
) -> Deployment:
    """The deployment on a machine: in Docker, or where `program` is given (Python, -m, module), with that.

    `keyed`: a key for clients is in the environment. Raises RecipeError where settings do not go with the machine,
    MachineError where the model does not fit on it.
    """
    refuse_open_server(settings, has_key=keyed)
    kind, image = machine.chip.kind, None if program else image_of(machine, settings)
    if image:
        vllm_checks.refuse_image(image, streams=weights.place == "bucket")
    length = settings.max_model_len or min(PROMPT_AND_OUTPUT, weights.variant.context)
    choices = [*_choose(machine, weights, settings, length, image)]
    settings = settings.model_copy(update={"max_model_len": length})
    model, mounts = weights.source, tuple[Mount, ...]()
    if image:
        model, settings, mounts = _see_from_container(kind, weights, settings)
    of_machine = [word for choice in choices for word in choice.arguments]
    server_arguments = _server_arguments(name, settings, of_machine, is_cpu=kind == "cpu")
    environment = {"HF_HUB_OFFLINE": "1"} if weights.is_folder else {}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if kind == "cpu":
        environment = vllm_issues.cpu_environment() | environment
    elif kind == "tpu" and image:
        environment["VLLM_XLA_CACHE_PATH"] = _XLA_CACHE.inside
    return Deployment(
        image=image,
        program=("serve",) if image else tuple(program),
        docker_flags=_DOCKER_FLAGS[kind] if image else (),
        environment=environment,
        passed=(*((KEY_VARIABLE,) if keyed else ()), *(() if weights.is_folder else ("HF_TOKEN",))),
        mounts=mounts,
        arguments=(*(() if image else ("--model",)), model, *server_arguments),
        port=settings.port or PORT,
        choices=tuple(choice for choice in choices if choice.why),
    )


def image_of(machine: Machine, settings: ServeSettings) -> str:
    return settings.container_image or (vllm_checks.TPU_IMAGE if machine.chip.kind == "tpu" else GPU_IMAGE)


def _server_arguments(name: str, settings: ServeSettings, of_machine: Sequence[str], *, is_cpu: bool) -> list[str]:
    """What every server is told behind its model; `of_machine`: by its kind. The user's own come last, so they win."""
    words = ["--served-model-name", name if settings.adapter is None else base_name(name)]
    words += ["--host", settings.host, "--port", str(settings.port or PORT)]
    words += ["--dtype", settings.dtype, "--seed", str(settings.seed)]
    words += vllm_issues.CONTENT_IN_PARTS if settings.images else vllm_issues.CONTENT_AS_TEXT
    words += ["--uvicorn-log-level", "warning", f"--{'' if settings.prefix_caching else 'no-'}enable-prefix-caching"]
    if settings.images and not settings.prefix_caching:
        # Without either cache vLLM knows an image by its request alone, and embeds it anew.
        words += vllm_issues.IMAGES_EMBEDDED_ANEW
    if settings.max_model_len is not None:
        words += ["--max-model-len", str(settings.max_model_len)]
    if settings.chat_template is not None:
        words += ["--chat-template", settings.chat_template]
    if settings.thinking:
        words += ["--default-chat-template-kwargs", '{"enable_thinking": true}', "--reasoning-parser", "gemma4"]
    words += of_machine
    if (adapter := settings.adapter) is not None:
        words += ["--enable-lora", *(vllm_issues.SPARE_ADAPTER_ON_CPU if is_cpu else ())]
        words += ["--max-lora-rank", str(max_lora_rank(adapter.rank)), "--lora-modules", f"{name}={adapter.folder}"]
    return [*words, *settings.arguments]


def _choose(
    machine: Machine, weights: Weights, settings: ServeSettings, length: int, image: str | None
) -> Iterator[DeploymentChoice]:
    """What machine and image decide, in the order of the arguments; one without a reason has arguments alone."""
    kind = machine.chip.kind
    if image:
        yield DeploymentChoice(image, "vLLM's own image; serve.container_image names another")
        yield _SHARED[kind]
        yield DeploymentChoice("--network host", "vLLM itself listens on serve.host then, and nowhere else")
    why = "serve.max_model_len: a prompt and its output together"
    if settings.max_model_len is None:
        why = "a prompt of 16,384 tokens and 1,024 of output, or what the model reads"
    yield DeploymentChoice(f"--max-model-len {length}", why)
    if kind == "cpu":
        yield from _choose_on_cpu(machine, weights, settings)
    else:
        layout = choose_layout(machine, weights.variant, settings, length)
        why = tensor_parallel_reason(machine, weights.variant, layout)
        yield choose_option("--tensor-parallel-size", str(layout.tp), why=why)
        choose = _choose_on_gpu if kind == "gpu" else _choose_on_tpu
        yield from choose(machine, weights, settings, layout, vllm_checks.read_version(image or ""))
        if weights.place == "bucket":
            why = "weights go from the bucket to the chip, by no disk"
            yield choose_option("--load-format", "runai_streamer", why=why)
            if kind == "gpu" and layout.tp > 1:
                why = "each GPU reads a share of the bucket's files, and passes it on to the others"
                yield choose_option("--model-loader-extra-config", '{"distributed": true}', why=why)
        yield from vllm_checks.tpu_warnings(
            machine, weights.variant, settings, layout.weight_dtype, in_image=image is not None, place=weights.place
        )
    if settings.adapter is not None:
        if kind == "tpu":
            raise RecipeError(
                "serve.weights: adapter was given, but on TPU vLLM does not apply a Gemma 4 adapter "
                f"({vllm_issues.TPU_ADAPTER.link}); set merged"
            )
        why = f"vLLM may load a Gemma 4 adapter and ignore it ({vllm_issues.ADAPTER_IGNORED.link})"
        yield DeploymentChoice("--enable-lora", f"{why}; it is compared with the base once up")


def _choose_on_cpu(machine: Machine, weights: Weights, settings: ServeSettings) -> Iterator[DeploymentChoice]:
    if settings.images:
        vllm_checks.refuse_on_cpu(weights.variant)
    if settings.kv_cache_dtype != "auto":
        raise RecipeError(f"serve.kv_cache_dtype: {settings.kv_cache_dtype} was given; on a CPU set auto")
    dtype = "float32" if settings.dtype == "float32" else "bfloat16"
    needed = serving_memory(weights.variant, tp=1, max_model_len=1, weight_dtype=dtype).weights
    why = "compiling takes longer than it saves in a short life on a CPU"
    yield DeploymentChoice("--enforce-eager", why, vllm_issues.QUICK_START_ON_CPU)
    if needed > machine.chip.hbm_bytes:
        why = f"the weights are {needed / 1e9:.0f} GB, this machine has {machine.chip.hbm_bytes / 1e9:.0f}: too little"
        yield DeploymentChoice("memory", why)
    yield DeploymentChoice("", "", tuple(vllm_checks.encoder_arguments(weights.config, settings, is_cpu=True)))


def _choose_on_gpu(
    machine: Machine, weights: Weights, settings: ServeSettings, layout: Layout, version: vllm_issues.Version | None
) -> Iterator[DeploymentChoice]:
    if layout.copies > 1:
        why = f"{machine.devices} GPUs hold {layout.copies} copies of the weights, behind one address"
        yield choose_option("--data-parallel-size", str(layout.copies), why=why)
    yield DeploymentChoice("memory", memory_reason(machine, layout), ("--gpu-memory-utilization", f"{UTILIZATION:.2f}"))
    if layout.weight_dtype == "fp8":
        yield choose_option("--quantization", "fp8", why=_fp8_reason(machine, "vLLM makes them as they are loaded"))
    takes_images = settings.images and bool(weights.config.get("vision_config"))
    budget = vllm_checks.image_budget(weights.variant, settings, takes_images=takes_images, version=version)
    if layout.batched_tokens != BATCHED[0] and budget is None:
        why = f"with {BATCHED[0]} the sliding windows' keys and values would not fit next to the weights"
        budget = choose_option("--max-num-batched-tokens", str(layout.batched_tokens), why=why)
    yield from _choose_encoder(weights, settings)
    if settings.kv_cache_dtype != "auto":
        yield choose_option("--kv-cache-dtype", settings.kv_cache_dtype, why="serve.kv_cache_dtype; e4m3 on a GPU")
    if budget is not None:
        yield budget
    if version is not None and vllm_issues.TRITON_ATTENTION.affects(version):
        heads = f"heads of {weights.variant.head_dim} and {weights.variant.global_head_dim} numbers"
        why = f"{heads} make this vLLM compute attention in Triton, slowly ({vllm_issues.TRITON_ATTENTION.link})"
        yield DeploymentChoice("attention", why)


def _choose_on_tpu(
    machine: Machine, weights: Weights, settings: ServeSettings, layout: Layout, version: vllm_issues.Version | None
) -> Iterator[DeploymentChoice]:
    yield DeploymentChoice("memory", memory_reason(machine, layout))
    if layout.weight_dtype == "fp8":
        why = _fp8_reason(machine, "Qwix makes them while they load, which tpu-inference calls deprecated")
        yield DeploymentChoice("--additional-config", why, ("--additional-config", json.dumps(_FP8_BY_QWIX)))
    whole_images = "--disable_chunked_mm_input"
    yield DeploymentChoice(whole_images, "an image's tokens attend to each other, so it is not cut into chunks")
    if settings.images:
        yield from _choose_encoder(weights, settings)
    else:
        why = "is false, and images are taken all the same: no switch is known to leave their encoder out on a TPU"
        yield DeploymentChoice("serve.images", why)
    if settings.kv_cache_dtype != "auto":
        dtype = "fp8_e5m2" if machine.chip.name == "v6e" else "fp8"
        why = "serve.kv_cache_dtype; on a v6e fp8 keys and values are e5m2, on a GPU e4m3"
        yield choose_option("--kv-cache-dtype", dtype, why=why)
    why = f"compiles for 8 to 10 minutes, others take that from the folder ({vllm_issues.TPU_CACHE.link})"
    why = f"the first start {why}; a bucket would not do"
    yield DeploymentChoice(f"VLLM_XLA_CACHE_PATH, {_XLA_CACHE.host}", why)
    yield DeploymentChoice("", "", (whole_images,))
    if budget := vllm_checks.image_budget(weights.variant, settings, takes_images=True, version=version):
        yield budget


def _choose_encoder(weights: Weights, settings: ServeSettings) -> Iterator[DeploymentChoice]:
    words = vllm_checks.encoder_arguments(weights.config, settings, is_cpu=False)
    if settings.images:
        yield choose_option(*words[:2], why="images alone; their number is limited by --max-model-len")
        yield choose_option(*words[2:4], why="data.image_tokens: as many soft tokens as an image was trained with")
        yield choose_option(*words[4:], why="images come in the request as data: URLs; the server fetches none")
    elif words:
        yield DeploymentChoice(words[0], "serve.images is false", tuple(words))


def _fp8_reason(machine: Machine, how: str) -> str:
    is_slow = machine.chip.name in ("v5e", "v5p", "v6e")
    slow = "; its matmuls are of bfloat16, so this saves memory alone" if is_slow else ""
    return f"weights in fp8: in bfloat16 they do not fit; {how}{slow}"


def _see_from_container(
    kind: str, weights: Weights, settings: ServeSettings
) -> tuple[str, ServeSettings, tuple[Mount, ...]]:
    """The model and the settings with paths in a container, and the mounts that show it the files of this machine."""
    model, mounts, inside = weights.source, list[Mount](), dict[str, Any]()
    if weights.place == "folder":
        mounts.append(Mount(host=model, inside=_MODEL_INSIDE))
        model = _MODEL_INSIDE
    if settings.chat_template is not None:
        mounts.append(Mount(host=settings.chat_template, inside=_TEMPLATE_INSIDE))
        inside["chat_template"] = _TEMPLATE_INSIDE
    if settings.adapter is not None:
        mounts.append(Mount(host=settings.adapter.folder, inside=_ADAPTER_INSIDE))
        inside["adapter"] = replace(settings.adapter, folder=_ADAPTER_INSIDE)
    if not weights.is_folder:
        mounts.append(_HUB_CACHE)
    if kind == "tpu":
        mounts += [_SHARED_MEMORY, _XLA_CACHE]
    return model, settings.model_copy(update=inside), tuple(mounts)


def choose_layout(machine: Machine, variant: Variant, settings: ServeSettings, length: int) -> Layout:
    """The best layout that fits, bfloat16 before fp8. Raises MachineError where none does."""
    kv_dtype = settings.kv_cache_dtype if settings.kv_cache_dtype != "auto" else settings.dtype
    limit = UTILIZATION * machine.chip.hbm_bytes / machine.chip.devices
    sizes = [tp for tp in reversed(allowed_tp(variant)) if machine.devices % tp == 0]
    if machine.chip.kind == "tpu":
        sizes = sizes[:1]  # one program over all chips of a slice
    else:
        # A second copy of the weights serves more than a kv head that two GPUs hold, where there is room for it.
        kv = (variant.kv_heads, variant.global_kv_heads)
        splitting = [tp for tp in sizes if all(heads % tp == 0 for heads in kv)]
        sizes = splitting + sorted(set(sizes) - set(splitting))
    dtypes = ("float32",) if settings.dtype == "float32" else ("bfloat16", "fp8")
    tried = []
    for dtype, tp, batched in itertools.product(dtypes, sizes, BATCHED):
        memory = serving_memory(
            variant,
            tp=tp,
            max_model_len=length,
            weight_dtype=dtype,
            kv_dtype=kv_dtype,
            batched_tokens=batched,
            # No switch is known to leave the encoder out on a TPU.
            images=settings.images or machine.chip.kind == "tpu",
        )
        layout = Layout(tp=tp, copies=machine.devices // tp, weight_dtype=dtype, batched_tokens=batched, memory=memory)
        if memory.total <= limit:
            return layout
        tried.append(layout)
    if not tried:
        raise MachineError(
            f"--machine {machine.name}: its {machine.devices} devices cannot share the {variant.heads} heads of "
            f"{variant.name}"
        )
    least = min(tried, key=lambda layout: layout.memory.total)
    raise MachineError(
        f"--machine {machine.name}: {variant.name} needs {least.memory.total / 1e9:.1f} GB a device with "
        f"{least.weight_dtype} weights and serve.max_model_len {length} (estimated), {limit / 1e9:.1f} may be used; "
        "lower serve.max_model_len, or name a larger machine"
    )


def tensor_parallel_reason(machine: Machine, variant: Variant, layout: Layout) -> str:
    heads = f"{variant.kv_heads} kv heads and {variant.global_kv_heads} global ones of {variant.name}"
    kv = {variant.kv_heads, variant.global_kv_heads}
    if all(number % layout.tp == 0 for number in kv):
        return f"divides the {heads}"
    held = " and ".join(f"{layout.tp // number} hold each of {number}" for number in sorted(kv) if number % layout.tp)
    less = "one program has all chips" if machine.chip.kind == "tpu" else "fewer lack memory"
    return f"of the {heads}: {held}; {less}"


def memory_reason(machine: Machine, layout: Layout) -> str:
    memory, limit = layout.memory, UTILIZATION * machine.chip.hbm_bytes / machine.chip.devices
    return (
        f"GB a device, estimated: {layout.weight_dtype} weights {memory.weights / 1e9:.1f}, one sequence's keys and "
        f"values {memory.kv_cache / 1e9:.1f}, a forward pass {memory.workspace / 1e9:.1f}; of {limit / 1e9:.1f} that "
        "vLLM may use"
    )
