"""What vLLM is told on this machine as it is."""

import json
from pathlib import Path

from gemsmith.serve import command
from gemsmith.serve.settings import ServedAdapter, ServeSettings, VllmEnvironment


def engine(package: str, version: str = "0.32.0") -> VllmEnvironment:
    return VllmEnvironment(python=Path("/env/bin/python"), package=package, version=version)


def told(on: VllmEnvironment, model: Path, name: str, settings: ServeSettings) -> list[str]:
    return command.server_command(on, model, name, settings)[0]


def test_on_a_cpu_the_text_class_is_served_in_one_eager_process(model: Path) -> None:
    words = told(engine("vllm-cpu"), model, "m", ServeSettings(max_model_len=640, arguments=("--max-num-seqs", "8")))
    assert '--hf-overrides {"architectures": ["Gemma4ForCausalLM"]}' in " ".join(words)
    assert "--enforce-eager" in words and "--no-enable-prefix-caching" in words
    assert words[-2:] == ["--max-num-seqs", "8"], "the user's arguments come last, so that they win"
    assert engine("vllm", "0.32.0+cpu").is_cpu


def test_on_a_gpu_the_towers_are_left_out_only_where_there_are_some(model: Path) -> None:
    assert "--hf-overrides" in told(engine("vllm"), model, "m", ServeSettings())
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {"depth": 27}})
    )
    words = told(engine("vllm"), model, "m", ServeSettings())
    assert "--language-model-only" in words and "--hf-overrides" not in words and "--enforce-eager" not in words
    (model / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForCausalLM"]}))
    assert "--language-model-only" not in told(engine("vllm"), model, "m", ServeSettings())


def test_with_an_adapter_the_weights_are_the_bases_name_and_the_adapter_has_the_tuned_models(model: Path) -> None:
    settings = ServeSettings(adapter=ServedAdapter(folder="/run/adapter", rank=10))
    words = told(engine("vllm-cpu"), model, "demo", settings)
    assert words[words.index("--served-model-name") + 1] == "demo-base"
    place = words.index("--enable-lora")
    rest = ["--max-loras", "2", "--max-lora-rank", "16", "--lora-modules", "demo=/run/adapter"]
    assert words[place:] == ["--enable-lora", *rest]


def test_images_keep_what_encodes_them(model: Path) -> None:
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {"depth": 27}})
    )
    words = told(engine("vllm"), model, "m", ServeSettings(images=True))
    assert "--language-model-only" not in words and "--hf-overrides" not in words
