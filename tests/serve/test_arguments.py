"""What vLLM is told on this machine as it is."""

import json
from pathlib import Path

from gemsmith.serve.command import server_command
from gemsmith.serve.settings import ServedAdapter, ServeSettings, VllmEnvironment


def engine(package: str, version: str = "0.32.0") -> VllmEnvironment:
    return VllmEnvironment(python=Path("/env/bin/python"), package=package, version=version)


def test_on_a_cpu_the_text_class_is_served_in_one_eager_process(model: Path) -> None:
    command = server_command(
        engine("vllm-cpu"), model, "m", 8000, ServeSettings(max_model_len=640, arguments=("--max-num-seqs", "8"))
    )
    assert '--hf-overrides {"architectures": ["Gemma4ForCausalLM"]}' in " ".join(command)
    assert "--enforce-eager" in command and "--no-enable-prefix-caching" in command
    assert command[-2:] == ["--max-num-seqs", "8"], "the user's arguments come last, so that they win"
    assert engine("vllm", "0.32.0+cpu").is_cpu


def test_on_a_gpu_the_towers_are_left_out_only_where_there_are_some(model: Path) -> None:
    assert "--hf-overrides" in server_command(engine("vllm"), model, "m", 8000, ServeSettings())
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {"depth": 27}})
    )
    command = server_command(engine("vllm"), model, "m", 8000, ServeSettings())
    assert "--language-model-only" in command and "--hf-overrides" not in command and "--enforce-eager" not in command
    (model / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForCausalLM"]}))
    assert "--language-model-only" not in server_command(engine("vllm"), model, "m", 8000, ServeSettings())


def test_with_an_adapter_the_weights_are_the_bases_name_and_the_adapter_has_the_tuned_models(model: Path) -> None:
    settings = ServeSettings(adapter=ServedAdapter(folder="/run/adapter", rank=10))
    command = server_command(engine("vllm-cpu"), model, "demo", 8000, settings)
    assert command[command.index("--served-model-name") + 1] == "demo-base"
    place = command.index("--enable-lora")
    rest = ["--max-loras", "2", "--max-lora-rank", "16", "--lora-modules", "demo=/run/adapter"]
    assert command[place:] == ["--enable-lora", *rest]


def test_images_keep_what_encodes_them(model: Path) -> None:
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {"depth": 27}})
    )
    command = server_command(engine("vllm"), model, "m", 8000, ServeSettings(images=True))
    assert "--language-model-only" not in command and "--hf-overrides" not in command
