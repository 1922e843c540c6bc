"""What vLLM still does otherwise than serving needs, by its source. Where a test fails, upstream has changed: drop its
row in docs/upstream.md, and the code that it names."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gemsmith.errors import MachineError
from gemsmith.serve.settings import find_vllm
from gemsmith.serve.vllm_issues import SERVER_MODULE

pytestmark = pytest.mark.vllm
# Finds the package without importing it.
WHERE = "import importlib.util; print(importlib.util.find_spec('vllm').submodule_search_locations[0])"


@pytest.fixture(scope="module")
def source() -> Callable[[str], str]:
    """Returns the text of a file of the serving environment's vLLM: `source("envs.py")`."""
    try:
        python = find_vllm().python
    except MachineError as error:
        pytest.skip(str(error))
    found = subprocess.run([str(python), "-I", "-c", WHERE], capture_output=True, text=True, check=True).stdout
    return lambda name: (Path(found.strip()) / name).read_text()


def test_the_command_asks_for_the_version_of_a_package_vllm(source: Callable[[str], str]) -> None:
    assert 'importlib.metadata.version("vllm")' in source("entrypoints/cli/main.py")


def test_the_module_that_serves_is_there_and_deprecated(source: Callable[[str], str]) -> None:
    text = source(SERVER_MODULE.partition(".")[2].replace(".", "/") + ".py")
    assert f"python -m {SERVER_MODULE}` command is deprecated" in text and "__main__" in text


def test_the_format_of_content_is_told_from_the_template(source: Callable[[str], str]) -> None:
    assert 'chat_template_content_format: ChatTemplateContentFormatOption = "auto"' in source(
        "entrypoints/launchers/cli_args.py"
    )
    assert "_detect_content_format(" in source("renderers/hf.py")


def test_the_class_with_vision_wants_a_vision_config(source: Callable[[str], str]) -> None:
    assert "config.vision_config.default_output_length" in source("model_executor/models/gemma4_mm.py")


def test_torchvision_alone_cannot_be_imported_on_a_cpu(source: Callable[[str], str]) -> None:
    engine = find_vllm()
    if not engine.torchvision or engine.torchvision.endswith("+cpu"):
        pytest.skip("the serving environment has no torchvision, or one for CPUs")
    command = [str(engine.python), "-I", "-c", "import torchvision"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "operator torchvision::nms does not exist" in done.stderr


def test_attention_on_a_cpu_knows_no_ranges_of_images(source: Callable[[str], str]) -> None:
    assert "mm_prefix" not in source("v1/attention/backends/cpu_attn.py")
    assert "mm_prefix" in source("model_executor/models/gemma4_mm.py")


def test_a_image_in_plain_text_is_no_token_of_gemma_4(source: Callable[[str], str]) -> None:
    assert 'return "<image_soft_token>"' in source("model_executor/models/gemma4_mm.py")


def test_the_engine_has_a_process_of_its_own_unless_told_otherwise(source: Callable[[str], str]) -> None:
    assert 'os.getenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")' in source("envs.py")


def test_no_adapter_is_the_last_place_on_a_cpu(source: Callable[[str], str]) -> None:
    decode = source("lora/punica_wrapper/punica_cpu.py").partition("def _shrink_decode")[2].partition("def ")[0]
    assert "bgmv_shrink(x, w_t_all, y, self.token_lora_indices, scale)" in decode and "no_lora" not in decode
    assert "lora_b_weights[lora_indices_tensor]" in source("lora/ops/torch_ops/lora_ops.py")


def test_a_seed_whose_prompt_is_cut_in_two_is_turned_back(source: Callable[[str], str]) -> None:
    assert "gen.set_offset(gen.get_offset() - 4)" in source("v1/worker/gpu_model_runner.py")


def test_an_engine_that_dies_points_up_in_its_log(source: Callable[[str], str]) -> None:
    assert "See root cause above. " in source("v1/engine/utils.py")


def test_the_load_test_counts_the_text_of_a_stream_without_usage(source: Callable[[str], str]) -> None:
    assert "outputs[i].generated_text, add_special_tokens=False" in source("benchmarks/serve.py")


def test_the_load_test_waits_six_hours(source: Callable[[str], str]) -> None:
    assert "timeout=aiohttp.ClientTimeout(total=6 * 60 * 60)" in source("benchmarks/serve.py")


def test_a_image_is_known_by_its_request_where_both_caches_are_off(source: Callable[[str], str]) -> None:
    text = source("renderers/base.py")
    assert "mm_processor_cache_gb == 0" in text and "and not self.config.cache_config.enable_prefix_caching" in text
    assert "mm_processor_cache_gb: float = Field(default=4" in source("config/multimodal.py")


def test_the_load_test_counts_the_message_of_the_role(source: Callable[[str], str]) -> None:
    text = source("benchmarks/lib/endpoint_request_func.py").partition("def async_request_openai_chat_completions")[2]
    text = text.partition("\nasync def ")[0]
    assert 'choices[0]["delta"].get("content")' in text and "first_chunk_received = True" in text
    assert "if content" not in text.partition("# First token")[0]


def test_random_prompts_are_decoded_from_random_tokens(source: Callable[[str], str]) -> None:
    assert "prompt = tokenizer.decode(token_sequence)" in source("benchmarks/datasets/datasets.py")
