"""Each known fault acts where a deployment would run into it, and nowhere else."""

import re
from pathlib import Path

import pytest

from gemsmith.arch import find_variant
from gemsmith.errors import MachineError, RecipeError
from gemsmith.hardware import load_catalog
from gemsmith.serve import vllm_issues
from gemsmith.serve.command import Weights, deploy, published_config
from gemsmith.serve.settings import ServedAdapter, ServeSettings, VllmEnvironment
from gemsmith.serve.vllm_checks import (
    image_budget,
    refuse_engine,
    refuse_image,
    tpu_warnings,
)
from gemsmith.serve.vllm_issues import KnownIssue


def test_every_fault_has_a_link_of_its_own_and_is_told_of() -> None:
    faults = {name: fault for name, fault in vars(vllm_issues).items() if isinstance(fault, KnownIssue)}
    assert len({fault.link for fault in faults.values()}) == len(faults) > 5
    text = Path(vllm_issues.__file__).read_text()
    for name, fault in faults.items():
        assert fault.link.startswith("https://github.com/vllm-project/")
        assert re.search(rf'^{name} = KnownIssue\(.*\)(\n"""|  # )\w', text, re.MULTILINE), f"{name} says what happens"


def test_a_version_has_a_fault_from_its_first_to_before_its_last() -> None:
    fault = KnownIssue(link="x", since=(0, 27), until=(0, 28))
    held = [fault.affects(version) for version in ((0, 26, 9), (0, 27), (0, 27, 1), (0, 28), None)]
    assert held == [False, True, True, False, True]


@pytest.mark.parametrize(("version", "transformers", "dies"), [
    ("0.27.1", "5.15.0", True), ("0.27.0+cpu", "5.19.0", True), ("0.27.1", "5.14.2", False),
    ("0.28.0", "5.15.0", False), ("0.32.0", "5.19.0", False), ("0.0.fake", "", False),
])  # fmt: skip
def test_an_environment_that_dies_at_start_is_refused(version: str, transformers: str, dies: bool) -> None:
    engine = VllmEnvironment(python=Path("/env/python"), package="vllm", version=version, transformers=transformers)
    if not dies:
        return refuse_engine(engine)
    with pytest.raises(MachineError, match=r"^serve.python: .*transformers 5.1.*51744"):
        refuse_engine(engine)
    return None


def test_an_image_that_dies_at_start_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^serve.container_image: vllm/vllm-openai:v0.27.1 .*51744"):
        refuse_image("vllm/vllm-openai:v0.27.1")
    for image in ("vllm/vllm-openai:v0.32.0", "vllm/vllm-openai:latest", "registry:5000/vllm"):
        refuse_image(image)


def budget(version: tuple[int, ...] | None, *arguments: str, model: str = "gemma4-31b", images: bool = True):
    settings = ServeSettings(arguments=arguments)
    found = image_budget(find_variant(model), settings, takes_images=images, version=version)
    return found.arguments if found else ()


def test_a_image_gets_room_in_a_batch_where_vllm_may_not_give_it() -> None:
    assert budget((0, 20)) == budget(None) == ("--max-num-batched-tokens", "4096")
    assert budget((0, 32)) == (), "it raises its default itself"
    assert budget((0, 20), images=False) == budget((0, 20), model="gemma4-e2b") == ()
    assert budget((0, 20), "--max-num-batched-tokens", "2496") == (), "the user's own"


@pytest.mark.parametrize("words", [("--max-num-batched-tokens", "2048"), ("--max_num_batched_tokens=2495",)])
def test_less_than_a_image_is_refused_in_every_version(words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError, match=r"^serve.arguments: .*2496 tokens.*42687\); set 4096"):
        budget((0, 32), *words)
    assert budget((0, 32), *words, images=False) == ()


def told_of(machine: str, what: str, **settings) -> list[str]:
    """Why, of what is chosen by that name."""
    variant = find_variant("gemma4-31b")
    weights = Weights(source="x/y", is_folder=False, variant=variant, config=published_config(variant))
    found = deploy(load_catalog().machines[machine], weights, ServeSettings(**settings), name="m", keyed=False)
    return [choice.why for choice in found.choices if choice.what == what]


def test_an_adapter_is_refused_on_a_tpu_and_comes_with_its_doubt_elsewhere() -> None:
    adapter = ServedAdapter(folder="/a", rank=8)
    with pytest.raises(RecipeError, match=r"^serve.weights: adapter .*2207\); set merged"):
        told_of("v6e-8", "--enable-lora", adapter=adapter)
    assert "41754" in told_of("2xh100", "--enable-lora", adapter=adapter)[0]


def test_slow_attention_is_said_of_the_versions_that_have_it() -> None:
    assert "256 and 512" in told_of("2xh100", "attention", container_image="vllm/vllm-openai:v0.19.0")[0]
    for image in ("vllm/vllm-openai:v0.32.0", "vllm/vllm-openai:latest"):
        assert not told_of("2xh100", "attention", container_image=image)


@pytest.mark.parametrize(
    ("machine", "model", "weight_dtype", "settings", "told"),
    [
        ("v6e-8", "gemma4-31b", "bfloat16", {}, ["0.19.0", "local folder", "fp8_e5m2"]),
        ("v6e-4", "gemma4-31b", "bfloat16", {}, ["0.19.0", "local folder", "fp8_e5m2", "issues/2333"]),
        ("v6e-4", "gemma4-31b", "fp8", {"kv_cache_dtype": "fp8"}, ["0.19.0", "local folder"]),
        ("v6e-8", "gemma4-31b", "bfloat16", {"arguments": ("--kv-cache-dtype=bfloat16",)}, ["0.19.0", "local folder"]),
        ("v6e-8", "gemma4-31b", "bfloat16", {"container_image": "vllm/vllm-tpu:v0.32.0"}, ["local folder", "fp8_e5m2"]),
        ("v5e-4", "gemma4-26b-a4b", "fp8", {"kv_cache_dtype": "fp8"}, ["0.19.0", "local folder", "issues/2453"]),
        ("v6e-1", "gemma4-e4b", "bfloat16", {"kv_cache_dtype": "fp8"}, ["0.19.0", "local folder", "not verified"]),
        ("2xh100", "gemma4-31b", "bfloat16", {}, []),
    ],
)
def test_a_tpu_is_warned_of_what_was_seen_there(machine, model, weight_dtype, settings, told) -> None:
    variant, where = find_variant(model), load_catalog().machines[machine]
    found = tpu_warnings(where, variant, ServeSettings(**settings), weight_dtype, in_image=True, place="folder")
    assert len(found) == len(told)
    for choice, word in zip(found, told, strict=True):
        assert choice.what == "warning" and word in choice.why and "https://" in choice.why


def test_a_hub_id_in_a_python_of_ones_own_is_warned_of_no_image_and_no_folder() -> None:
    machine, settings = load_catalog().machines["v6e-8"], ServeSettings(kv_cache_dtype="fp8")
    variant = find_variant("gemma4-31b")
    assert tpu_warnings(machine, variant, settings, "bfloat16", in_image=False, place="hub") == ()
