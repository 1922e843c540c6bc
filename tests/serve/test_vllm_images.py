"""Images on the real vLLM, against transformers from the same pixels; `make test-vllm`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gemsmith.checkpoints.peft import write_peft_adapter
from gemsmith.data.dataset import Document
from gemsmith.data.tokenize import open_renderer
from gemsmith.errors import EngineError, MachineError
from gemsmith.evals.generate import compare_prompts, make_request
from gemsmith.evals.stage import evaluate
from gemsmith.evals.tasks import open_tasks
from gemsmith.images.check import validate_image
from gemsmith.images.decode import make_rgb
from gemsmith.images.patches import PatchConfig, make_patches
from gemsmith.runs.run import Run
from gemsmith.serve.client.chat import api_messages
from gemsmith.serve.server import Server, running_server
from gemsmith.serve.settings import ServedAdapter, ServeSettings, find_vllm
from gemsmith.serve.stage import Servers
from gemsmith.tasks.messages import ImagePart, Message, TextPart, text_message
from support.images import image_bytes
from support.trained_run import make_adapter
from tiny_checkpoints import IMAGE_TOKENS

pytestmark = pytest.mark.vllm
PATCHING = PatchConfig(budget=70, patch=4)
IMAGE = IMAGE_TOKENS["image_token"][0]


@pytest.fixture(autouse=True, scope="module")
def _needs_vllm() -> None:
    try:
        if not find_vllm().torchvision:
            pytest.skip("the serving environment has no torchvision; make it again")
    except MachineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, seeing_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    write_peft_adapter(make_adapter("tiny-e2b"), folder, str(seeing_checkpoint))
    return folder


@pytest.fixture(scope="module")
def server(
    _needs_vllm: None, seeing_checkpoint: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Base and adapter: `m-base` and `m`."""
    settings = ServeSettings(
        max_model_len=640,
        dtype="float32",
        images=True,
        image_tokens=70,
        adapter=ServedAdapter(folder=str(adapter), rank=4),
    )
    log = tmp_path_factory.mktemp("vllm") / "log"
    with running_server(seeing_checkpoint, name="m", settings=settings, log=log) as running:
        yield running


def conversation(*images: bytes) -> tuple[Message, ...]:
    """Two turns, with images at several places of them, and white space that templates take away."""
    first, *others = (ImagePart(data=image) for image in images)
    return (
        text_message("system", "Be brief. "),
        Message(role="user", parts=(first, TextPart(text=" what is it?\n"))),
        text_message("assistant", "A wire."),
        Message(role="user", parts=(TextPart(text="and "), *others, TextPart(text=" now?"))),
    )


def ask(server: Server, model: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    asked = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    asked |= {"logprobs": True, "top_logprobs": 1, "return_token_ids": True} | more
    response = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


def reference_logits(model: Any, ids: list[int], images: tuple[bytes, ...]) -> Any:
    import torch

    patches = [make_patches(make_rgb(image), PATCHING) for image in images]
    rooms = [((0, 70 * 9 - len(each.values)), (0, 0)) for each in patches]
    values, positions = (
        torch.tensor(
            np.stack(
                [
                    np.pad(getattr(each, name), room, constant_values=padding)
                    for each, room in zip(patches, rooms, strict=True)
                ]
            )
        )
        for name, padding in (("values", 0), ("positions", -1))
    )
    tokens = torch.tensor([ids])
    with torch.no_grad():
        return model(
            tokens,
            pixel_values=values,
            image_position_ids=positions.long(),
            mm_token_type_ids=(tokens == IMAGE).long(),
        ).logits[0]


# Of 70 soft tokens 64, 63 (resized here) and 60; the server leaves all three as they are.
IMAGES = (image_bytes(96, 96, seed=1), image_bytes(400, 300, seed=2), image_bytes(30, 20, seed=3))


@pytest.mark.parametrize("name", ["m-base", "m"])
def test_tokens_and_log_probabilities_are_those_of_transformers_from_the_same_pixels(
    name: str, server: Server, adapter: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import Gemma4ForConditionalGeneration

    model: Any = Gemma4ForConditionalGeneration.from_pretrained(server.folder, dtype=torch.float32).eval()
    if name == "m":
        model = PeftModel.from_pretrained(model, adapter).eval()
    seen = [validate_image(image, PATCHING) for image in IMAGES]
    found = ask(server, name, api_messages(conversation(*IMAGES), seen, PATCHING))
    prompt, tokens = found["prompt_token_ids"], found["choices"][0]["token_ids"]
    logits = reference_logits(model, [*prompt, *tokens], IMAGES)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    logprobs = [token["logprob"] for token in found["choices"][0]["logprobs"]["content"]]
    # Measured: 6e-5.
    np.testing.assert_allclose(logprobs, expected, atol=3e-4)


def test_the_adapter_is_applied_beside_images(server: Server) -> None:
    messages = api_messages(conversation(*IMAGES), (), PATCHING)
    base, tuned = (ask(server, name, messages)["choices"][0]["token_ids"] for name in ("m-base", "m"))
    assert base != tuned


def test_prompts_are_read_as_training_makes_them(server: Server) -> None:
    renderer = open_renderer(server.folder)
    messages = conversation(*IMAGES)
    seen = tuple(validate_image(image, PATCHING) for image in IMAGES)
    from gemsmith.data.tokenize import check_prompts

    row = Document(messages=(*messages, text_message("assistant", "x")), origin="row 1", images=seen)
    (ids,) = check_prompts(renderer, [(row, len(messages))])
    found = ask(server, "m", api_messages(messages, seen, PATCHING))
    assert found["prompt_token_ids"] == ids.tolist()
    assert ids.tolist().count(IMAGE) == sum(image.soft_tokens for image in seen) == 64 + 63 + 60


def test_a_image_elsewhere_is_not_fetched(server: Server) -> None:
    for url in ("http://127.0.0.1:9/a.png", "https://example.com/a.png", f"file://{server.log}"):
        content = [{"type": "image_url", "image_url": {"url": url}}]
        asked = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60, trust_env=False)
        assert answer.status_code >= 400
        assert "allowed domains" in answer.text or "local" in answer.text, answer.text


def test_eval_asks_about_photos_and_sees_that_prompts_are_the_trained_ones(photo_run: Callable[..., Run]) -> None:
    run = photo_run({"serve": {"dtype": "float32"}, "eval": {"max_tokens": 8}})
    with Servers(run) as servers:
        record = evaluate(run, servers)
    (result,) = record.tasks
    assert result.base.prompts_compared == result.tuned.prompts_compared == 3
    assert record.base == record.tuned and record.tuned.n == 6, "the same weights answer the same"
    assert result.labels is not None and result.labels.labels == ("great dane", "sphynx")


def test_another_template_on_the_server_is_noticed(server: Server, photo_run: Callable[..., Run]) -> None:
    (task,), _ = open_tasks(photo_run())
    request = make_request(server, task, 0)
    good = task.prompts[0].tolist()
    assert compare_prompts(server, {"row 1": (request, good)}) == 1
    with pytest.raises(EngineError, match=r"row 1: vLLM at .* reads another prompt than was trained"):
        compare_prompts(server, {"row 1": (request, [*good[:3], 9, *good[4:]])})
    assert json.dumps(request.body).count("data:image/png;base64,") == 1
