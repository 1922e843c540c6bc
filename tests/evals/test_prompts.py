"""Whether the server reads what was trained; with the real one: tests/serve/test_vllm_images.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gemsmith.errors import EngineError
from gemsmith.evals.stage import evaluate
from gemsmith.evals.tasks import open_tasks
from gemsmith.images.patches import PatchConfig, count_soft_tokens
from gemsmith.runs.run import Run
from gemsmith.serve.stage import Servers
from tiny_checkpoints import IMAGE_TOKENS

BOI, IMAGE, EOI = (IMAGE_TOKENS[f"{name}_token"][0] for name in ("boi", "image", "eoi"))


def test_the_ids_of_a_prompt_have_the_soft_tokens_of_its_images_and_no_answer(photo_run: Callable[..., Run]) -> None:
    (task,), _ = open_tasks(photo_run())
    for question, ids in zip(task.questions, task.prompts, strict=True):
        (image,) = question.images
        count = count_soft_tokens(image.width, image.height, PatchConfig(budget=70, patch=4))
        begin = ids.tolist().index(BOI)
        assert ids[begin : begin + count + 2].tolist() == [BOI, *[IMAGE] * count, EOI]
        assert ids.tolist().count(IMAGE) == count and ids[0] == 2 and ids[-1] == 107, "ends where the answer begins"


def test_a_server_that_reads_other_ids_ends_the_evaluation_in_a_line(
    photo_run: Callable[..., Run], fake_vllm: Callable[..., Path]
) -> None:
    fake_vllm(reads=[2, 105, 9])
    run = photo_run()
    with Servers(run) as servers, pytest.raises(EngineError) as error:
        evaluate(run, servers)
    assert "reads another prompt than was trained: 3 tokens, not" in str(error.value)
    assert "from place 2 on [9], not [" in str(error.value) and "\n" not in str(error.value)
