"""An adapter beside its base: names and vLLM's arguments."""

from pathlib import Path

import pytest

from gemsmith.checkpoints.peft import target_pattern
from gemsmith.checkpoints.peft_config import PeftConfig
from gemsmith.errors import RecipeError
from gemsmith.serve.command import server_command
from gemsmith.serve.settings import ServedAdapter, ServeSettings, VllmEnvironment
from gemsmith.serve.vllm_checks import refuse_vision


def lora_arguments(model: Path, rank: int, package: str = "vllm") -> list[str]:
    engine = VllmEnvironment(python=Path("/env/bin/python"), package=package, version="0.32.0")
    settings = ServeSettings(adapter=ServedAdapter(folder="/a", rank=rank))
    command, _ = server_command(engine, model, "demo", settings)
    return command[command.index("--enable-lora") :]


@pytest.mark.parametrize(("rank", "asked"), [(1, "8"), (16, "16"), (17, "32"), (512, "512"), (600, "600")])
def test_the_rank_is_rounded_up_to_one_that_vllm_takes(model: Path, rank: int, asked: str) -> None:
    assert lora_arguments(model, rank) == ["--enable-lora", "--max-lora-rank", asked, "--lora-modules", "demo=/a"]


def test_on_a_cpu_the_last_of_two_places_stays_empty(model: Path) -> None:
    assert lora_arguments(model, 8, "vllm-cpu")[1:3] == ["--max-loras", "2"]


@pytest.mark.parametrize(
    "module", ["model.vision_tower.encoder.layers.0.self_attn.q_proj.linear", "model.embed_vision.embedding_projection"]
)
def test_an_adapter_on_what_encodes_images_is_refused_since_vllm_leaves_that_out(module: str) -> None:
    def config(*modules: str) -> PeftConfig:
        return PeftConfig.model_validate({"r": 4, "lora_alpha": 8, "target_modules": target_pattern(modules)})

    text = "model.language_model.layers.0.self_attn.q_proj"
    refuse_vision(config(text))
    with pytest.raises(RecipeError, match=r"^serve.weights: adapter was given, .* set merged$"):
        refuse_vision(config(text, module))
