"""Known faults of vLLM with Gemma 4, and what a deployment that would run into one does about it.

Each entry: what happens, the versions that it holds for, where it was read, and what is done here. An image whose tag
is no version may have any of them. https://github.com/vllm-project/vllm/issues/N is written vllm #N.

MM_BUDGET: vLLM dies at start, `max_tokens_per_mm_item (2496) is larger than max_num_batched_tokens (2048)`: tokens of
one image attend to each other, so it is not cut into chunks, and by default fewer are batched than one has.
    holds: 0.20.0, where it was seen, and maybe on; 0.32.0 raises its own default, but not what it is told
    link:  vllm #42687
    does:  adds --max-num-batched-tokens where the version may need it; refuses a lower one

ADAPTER_IGNORED: an adapter loads, each request that names it is answered, and the answers are the base's.
    holds: all versions so far
    link:  vllm #41754 (open), vllm #55193
    does:  merged weights by default; base and adapter are compared after every start, and no difference is an error

TRANSFORMERS_5_15: vLLM dies at start with AmbiguousGlobalPerLayerAttributeError, with transformers 5.15 or later.
    holds: 0.27.0 to 0.27.1
    link:  vllm #51744, vllm #52768
    does:  refuses that environment, or that image

TRITON_ATTENTION: heads of 256 and 512 numbers made vLLM compute all attention in Triton, at a tenth of the speed.
    holds: 0.19.0, where it was seen, and maybe on; 0.32.0 takes FlashAttention 4 where the GPU has it, else Triton
    link:  vllm #38887, vllm #42175
    does:  says so

TPU_ADAPTER: on TPU a Gemma 4 adapter is not applied.
    holds: all versions so far
    link:  https://github.com/vllm-project/tpu-inference/issues/2207
    does:  refuses serve.weights: adapter there

TPU_CACHE: compiled programs were compiled again at each start, although VLLM_XLA_CACHE_PATH was set; in a bucket they
still are.
    holds: seen of a folder in August 2025, closed since; of a bucket seen in January 2026
    link:  https://github.com/vllm-project/tpu-inference/issues/606
    does:  a folder of this machine is mounted, and said

What else was seen of vLLM on TPUs is a row of tpu_warnings, each with its link.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gemsmith.arch import Variant
from gemsmith.errors import MachineError, RecipeError
from gemsmith.hardware import Machine
from gemsmith.serve.container import Choice
from gemsmith.serve.settings import ServeSettings, VllmEnvironment

Version = tuple[int, ...]
_VLLM, _TPU = "https://github.com/vllm-project/vllm/issues/", "https://github.com/vllm-project/tpu-inference/issues/"

IMAGE_TOKENS = 2496
"""Of Gemma 4's largest image (vllm #42687)."""
BATCHED_TOKENS = 4096
"""The least that vLLM's own recipes give where a image must fit."""


@dataclass(frozen=True, kw_only=True)
class KnownIssue:
    """A fault, from `since` up to but not including `until`; None: from the first, or not mended yet."""

    link: str
    since: Version | None = None
    until: Version | None = None

    def affects(self, version: Version | None) -> bool:
        """Whether a version has it; one that is not known may."""
        if version is None:
            return True
        return (self.since is None or version >= self.since) and (self.until is None or version < self.until)


MM_BUDGET = KnownIssue(link=f"{_VLLM}42687", until=(0, 32))
ADAPTER_IGNORED = KnownIssue(link=f"{_VLLM}41754")
TRANSFORMERS_5_15 = KnownIssue(link=f"{_VLLM}51744", since=(0, 27), until=(0, 28))
TRITON_ATTENTION = KnownIssue(link=f"{_VLLM}38887", until=(0, 32))
TPU_ADAPTER = KnownIssue(link=f"{_TPU}2207")
TPU_CACHE = KnownIssue(link=f"{_TPU}606")
WARNING = "warning"
"""What a Choice is called that warns."""
TPU_IMAGE = "vllm/vllm-tpu:gemma4"
_PAPER, _RECIPES = "https://arxiv.org/abs/2605.25645", "https://github.com/AI-Hypercomputer/tpu-recipes"


def read_version(text: str) -> Version | None:
    """A version, or an image's tag, as numbers; None where it is none.

    >>> [read_version(text) for text in ("0.32.0+cpu", "vllm/vllm-openai:v0.27.1", "vllm/vllm-tpu:gemma4")]
    [(0, 32, 0), (0, 27, 1), None]
    """
    found = re.match(r"v?(\d+(?:\.\d+)+)", text.rpartition(":")[2])
    return tuple(int(part) for part in found[1].split(".")) if found else None


def refuse_image(image: str) -> None:
    """Raises RecipeError for an image that cannot start a Gemma 4."""
    version = read_version(image)
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
    variant: Variant, settings: ServeSettings, *, takes_images: bool, version: Version | None
) -> tuple[tuple[str, ...], tuple[Choice, ...]]:
    """Arguments that let one image fit into a batch, with their reason; none where vLLM sees to it.

    Raises RecipeError where the user's own arguments, or serve.max_model_len, leave no room for one.
    """
    if not takes_images or not variant.bidirectional_images:
        return (), ()
    given = option_value(settings.arguments, "--max-num-batched-tokens")
    if given is not None:
        if given.isdecimal() and int(given) < IMAGE_TOKENS:
            raise RecipeError(
                f"serve.arguments: --max-num-batched-tokens {given} is less than one image of {IMAGE_TOKENS} "
                f"tokens, and vLLM would die at start ({MM_BUDGET.link}); set {BATCHED_TOKENS}"
            )
        return (), ()
    if not MM_BUDGET.affects(version):
        return (), ()
    why = f"a image has up to {IMAGE_TOKENS} tokens and is not cut; vLLM may batch fewer, and die ({MM_BUDGET.link})"
    argument = ("--max-num-batched-tokens", str(BATCHED_TOKENS))
    return argument, (Choice(what=" ".join(argument), why=why),)


def adapter_choice(kind: str) -> Choice:
    """What must be known of a served adapter. Raises RecipeError where it would not be applied."""
    if kind == "tpu":
        raise RecipeError(
            f"serve.weights: adapter was given, but on TPU vLLM does not apply a Gemma 4 adapter ({TPU_ADAPTER.link}); "
            "set merged"
        )
    why = (
        f"vLLM may load a Gemma 4 adapter and ignore it ({ADAPTER_IGNORED.link}); it is compared with the base once up"
    )
    return Choice(what="--enable-lora", why=why)


def tpu_warnings(
    machine: Machine, variant: Variant, settings: ServeSettings, weight_dtype: str, *, in_image: bool, is_folder: bool
) -> tuple[Choice, ...]:
    """What went wrong, or otherwise than one would think, with such a model on such a TPU; none elsewhere."""
    if machine.chip.kind != "tpu":
        return ()
    name, chip, image = variant.name, machine.chip.name, settings.image or TPU_IMAGE
    kv = option_value(settings.arguments, "--kv-cache-dtype") or settings.kv_cache_dtype
    lacks_memory = (name, machine.name, weight_dtype) == ("gemma4-31b", "v6e-4", "bfloat16")
    seen = (
        (in_image and image == TPU_IMAGE, f"{image} is vLLM 0.19.0; serve.container_image names a later one", _PAPER),
        (is_folder, "vLLM's image for TPUs refused a local folder, and took a hub id alone", f"{_PAPER}, its notes"),
        (
            kv == "auto",
            "kv_cache_dtype auto was fp8_e5m2 on a v6e-8; --kv-cache-dtype in serve.arguments names it",
            _PAPER,
        ),
        (name in ("gemma4-e2b", "gemma4-e4b"), f"Google's recipes for TPUs call {name} not verified", _RECIPES),
        (
            lacks_memory,
            "the 31B ran out of memory there in bfloat16, and ran with weights and KV in fp8",
            f"{_TPU}2333",
        ),
        (name == "gemma4-26b-a4b" and chip == "v5e", "the 26B-A4B could not be run there", f"{_TPU}2453"),
    )
    return tuple(Choice(what=WARNING, why=f"{why} ({link})") for holds, why, link in seen if holds)


def attention_choice(variant: Variant, version: Version | None) -> tuple[Choice, ...]:
    if version is None or not TRITON_ATTENTION.affects(version):
        return ()
    heads = f"{variant.head_dim} and {variant.global_head_dim}"
    why = f"heads of {heads} numbers make this vLLM compute attention in Triton, slowly ({TRITON_ATTENTION.link})"
    return (Choice(what="attention", why=why),)


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
