"""What a server says of itself, read from what vLLM 0.32.0 wrote; and what it does not say."""

import json

from gemsmith.runs.records import ServerFacts
from gemsmith.serve.server import read_facts

# Of a start on a CPU; the line goes on, and has more of each.
ENGINE = (
    "(EngineCore pid=7956) INFO 11-23 01:53:06 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='/m', tokenizer='/m', dtype=torch.float32, max_seq_len=640, load_format=auto, tensor_parallel_size=2, "
    "pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1, quantization=None, "
    "quantization_config=None, enforce_eager=True, kv_cache_dtype=auto, device_config=cpu, seed=0, "
    "served_model_name=m, enable_prefix_caching=False, enable_chunked_prefill=True, pooler_config=None\n"
)
METRICS = (
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{block_size="128",cache_dtype="auto",enable_prefix_caching="False",engine="0",'
    'kv_cache_size_tokens="308404",num_gpu_blocks="8192",num_gpu_blocks_override="None"} 1.0\n'
)
WHOLE = ServerFacts(
    version="0.32.0",
    dtype="float32",
    quantization="none",
    kv_cache_dtype="auto",
    tensor_parallel=2,
    data_parallel=1,
    max_model_len=640,
    chunked_prefill=True,
    prefix_caching=False,
    kv_blocks=8192,
    kv_block_tokens=128,
    kv_cache_tokens=308404,
)


def answer(body: str, head: str = "HTTP/1.1 200 OK") -> bytes:
    return f"{head}\r\ncontent-type: x\r\n\r\n{body}".encode()


def read(*, models: object = None, version: object = None, metrics: str = METRICS, log: str = ENGINE) -> ServerFacts:
    return read_facts(
        models=answer(json.dumps(models or {"data": [{"id": "m", "max_model_len": 640}]})),
        version=answer(json.dumps({"version": "0.32.0"} if version is None else version)),
        metrics=answer(metrics),
        log=log,
    )


def test_all_is_read_from_the_log_and_three_answers() -> None:
    assert read() == WHOLE and read().unread == ()


def test_what_cannot_be_read_is_said_and_not_assumed() -> None:
    facts = read(models={"data": []}, version={}, metrics="", log="nothing of use\n")
    fields = set(ServerFacts.model_fields) - {"unread"}
    assert set(facts.unread) == fields and all(getattr(facts, name) is None for name in fields)


def test_one_source_stands_in_for_another() -> None:
    facts = read(models={"data": [{"id": "adapter", "max_model_len": None}]}, version=[], metrics="x 1")
    assert (facts.max_model_len, facts.version, facts.prefix_caching) == (640, "0.32.0", False)
    assert facts.unread == ("kv_blocks", "kv_block_tokens", "kv_cache_tokens")


def test_answers_that_are_no_answers_are_not_read() -> None:
    facts = read_facts(models=b"", version=b"HTTP/1.1 404", metrics=b"\xff\xfe\r\n\r\n\xff", log="")
    assert len(facts.unread) == len(ServerFacts.model_fields) - 1
