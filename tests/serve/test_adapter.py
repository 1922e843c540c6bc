"""An adapter beside its base: names and vLLM's arguments."""

import pytest

from gemsmith.checkpoints.peft import target_pattern
from gemsmith.checkpoints.peft_config import PeftConfig
from gemsmith.errors import RecipeError
from gemsmith.serve.command import lora_arguments
from gemsmith.serve.settings import ServedAdapter
from gemsmith.serve.vllm_checks import refuse_vision


@pytest.mark.parametrize(("rank", "asked"), [(1, "8"), (16, "16"), (17, "32"), (512, "512"), (600, "600")])
def test_the_rank_is_rounded_up_to_one_that_vllm_takes(rank: int, asked: str) -> None:
    arguments = lora_arguments(ServedAdapter(folder="/a", rank=rank), "demo", is_cpu=False)
    assert arguments == ["--enable-lora", "--max-lora-rank", asked, "--lora-modules", "demo=/a"]


def test_on_a_cpu_the_last_of_two_places_stays_empty() -> None:
    assert lora_arguments(ServedAdapter(folder="/a", rank=8), "demo", is_cpu=True)[1:3] == ["--max-loras", "2"]


@pytest.mark.parametrize(
    "module", ["model.vision_tower.encoder.layers.0.self_attn.q_proj.linear", "model.embed_vision.embedding_projection"]
)
def test_an_adapter_on_what_encodes_images_is_refused_since_vllm_leaves_that_out(module: str) -> None:
    def config(*modules: str) -> PeftConfig:
        values = {"target_modules": target_pattern(modules)}
        return PeftConfig(rank=4, alpha=8.0, rslora=False, dropout=0.0, values=values)

    text = "model.language_model.layers.0.self_attn.q_proj"
    refuse_vision(config(text))
    with pytest.raises(RecipeError, match=r"^serve.weights: adapter was given, .* set merged$"):
        refuse_vision(config(text, module))
