"""An adapter beside its base: names and vLLM's arguments."""

import pytest

from gemsmith.serve.adapter import ServedAdapter, lora_arguments, served_name


@pytest.mark.parametrize(("rank", "asked"), [(1, "8"), (16, "16"), (17, "32"), (512, "512"), (600, "600")])
def test_the_rank_is_rounded_up_to_one_that_vllm_takes(rank: int, asked: str) -> None:
    arguments = lora_arguments(ServedAdapter(folder="/a", rank=rank), "demo", is_cpu=False)
    assert arguments == ["--enable-lora", "--max-lora-rank", asked, "--lora-modules", "demo=/a"]


def test_on_a_cpu_the_last_of_two_places_stays_empty() -> None:
    assert lora_arguments(ServedAdapter(folder="/a", rank=8), "demo", is_cpu=True)[1:3] == ["--max-loras", "2"]


def test_the_tuned_models_name_is_the_adapters_where_there_is_one() -> None:
    assert served_name("demo", None) == "demo"
    assert served_name("demo", ServedAdapter(folder="/a", rank=8)) == "demo-base"
