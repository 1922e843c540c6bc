"""Evaluation of a run over a folder of images, against a stand-in for vLLM."""

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gemsmith.errors import DataError, RecipeError
from gemsmith.evals.cache import ANSWERS, DONE
from gemsmith.evals.results import image_notices
from gemsmith.evals.stage import evaluate
from gemsmith.evals.tasks import open_tasks, read_questions
from gemsmith.images.check import patchify, to_data_url
from gemsmith.images.patches import PatchConfig, cut
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.run import Run, stage_keys
from gemsmith.serve.stage import Servers
from gemsmith.tasks.base import Question
from gemsmith.tasks.messages import text_of
from support.images import image_bytes

PATCHING = PatchConfig(budget=70, patch=4)


def right_answers(questions: Sequence[Question]) -> dict[str, str]:
    """What the stand-in is asked, with an image as the SHA-256 of its bytes -> the expected answer."""
    found = {}
    for question in questions:
        (part, text) = question.messages[0].parts
        png = base64.b64decode(to_data_url(part.path, PATCHING).partition(",")[2])
        found[hashlib.sha256(png).hexdigest() + text.text] = question.expected
    return found


def chats(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def scored(run: Run) -> EvalRecord:
    with Servers(run) as servers:
        return evaluate(run, servers)


def test_photos_are_asked_about_in_the_pixels_that_training_cuts_up_and_classified(
    photo_run: Callable[..., Run], fake_vllm: Callable[..., Path], tmp_path: Path
) -> None:
    asked, run = tmp_path / "asked", photo_run({"eval": {"concurrency": 1}})
    questions = read_questions(run)
    fake_vllm(asked=str(asked), answers=dict(list(right_answers(questions).items())[:5]))
    record = scored(run)
    (result,) = record.tasks
    assert (record.tuned.score, record.tuned.n, record.base.score) == (5 / 6, 6, 0)
    assert result.labels is not None and result.labels.rows == {"great dane": 3, "sphynx": 3}
    assert result.labels.base.unknown.value == 1 and result.labels.tuned.unknown.value == pytest.approx(1 / 6)
    assert result.labels.most_confused[0].images[0].startswith("data:image/jpeg;base64,")
    assert all(row["thumbnails"][0].startswith("data:image/jpeg;base64,") for row in record.examples)
    assert result.tuned.prompts_compared == 0, "the stand-in does not tell what it reads"
    rows = [json.loads(line) for line in (run.logs / "eval_rows.jsonl").read_text().splitlines()]
    assert [Path(row["images"][0]).parent.name for row in rows] == ["great_dane"] * 3 + ["sphynx"] * 3
    sent = [chat for chat in chats(asked) if chat["model"] == "demo" and not chat.get("return_token_ids")]
    assert len(sent) == len(questions) == 6
    for chat, question in zip(sent, questions, strict=True):
        image, text = chat["messages"][0]["content"]
        assert text == {"type": "text", "text": text_of(question.messages[0])}
        png = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
        assert (cut(Image.open(BytesIO(png)), PATCHING) == patchify(question.images[0], PATCHING)).all()


@pytest.mark.slow
def test_a_retry_asks_for_what_has_changed_and_does_not_evaluate_the_base_again(
    photo_run: Callable[..., Run], fake_vllm: Callable[..., Path], tmp_path: Path
) -> None:
    asked, run = tmp_path / "asked", photo_run()
    fake_vllm(asked=str(asked))
    scored(run)
    # As a second start finds it after a kill: no record yet, and all answers there. The tuned weights are others, and
    # one image is.
    run.record_file("eval").unlink()
    (run.logs / DONE).rename(run.logs / ANSWERS)
    record = json.loads(run.record_file("export").read_text())
    run.record_file("export").write_text(json.dumps(record | {"step": 2}))
    Path(read_questions(run)[0].images[0].path).write_bytes(image_bytes(96, 96, seed=99))
    before = len(chats(asked))
    with Servers(run, skip_verify_check=True) as servers:
        evaluate(run, servers)
    again = [chat["model"] for chat in chats(asked)[before:] if not chat.get("return_token_ids")]
    assert (again.count("demo"), again.count("demo-base")) == (6, 1)


@pytest.mark.parametrize(
    ("data", "stale"),
    [
        ({"prompt": "What is it?"}, True),
        ({"held_out": 0.4}, True),
        ({"image_tokens": 140}, True),
        ({"labels": {"great_dane": "Dane", "sphynx": "cat"}}, True),
        ({"max_length": 1024}, False),
    ],
)
def test_what_makes_the_questions_makes_the_evaluation_again(
    data: dict[str, Any], stale: bool, photo_run: Callable[..., Run]
) -> None:
    run = photo_run()
    values = run.recipe.model_dump(mode="json", exclude_unset=True)
    values["data"] |= data
    assert (stage_keys(build_recipe(values), "eval") != stage_keys(run.recipe, "eval")) == stale


def test_a_held_out_image_that_cannot_be_used_is_an_error_before_a_server_starts(
    photo_run: Callable[..., Run],
) -> None:
    run = photo_run()
    file = Path(read_questions(run)[1].images[0].path)
    file.write_bytes(b"no image")
    with pytest.raises(DataError, match=rf"^data.eval, great_dane/{file.name}: .* is none of"):
        open_tasks(run)


def test_likelihoods_of_choices_are_not_asked_after_a_image(photo_run: Callable[..., Run]) -> None:
    options = {"choices": ["great dane", "sphynx"]}
    run = photo_run({"eval": {"scorer": "multiple-choice", "options": options}})
    with pytest.raises(RecipeError, match=r"^eval: multiple-choice asks how likely .* has an image; set eval.scorer"):
        open_tasks(run)


def test_held_out_images_of_a_run_that_was_trained_on_text_need_a_server_that_takes_them(
    exported_run: Callable[..., Run], seeing_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(image_bytes())
    file = tmp_path / "held.jsonl"
    file.write_text(json.dumps({"image": "a.png", "prompt": "a", "response": "b"}) + "\n")
    run = exported_run({"data": {"eval": str(file)}}, checkpoint=seeing_checkpoint)
    with pytest.raises(RecipeError, match=r"^serve.images: is false.*held.jsonl line 1 of data.eval has one; set it"):
        scored(run)


def test_images_that_the_server_resizes_itself_are_counted(photo_run: Callable[..., Run]) -> None:
    run = photo_run()
    (task,), _ = open_tasks(run)
    assert not list(image_notices(task))
    Path(task.questions[0].images[0].path).write_bytes(image_bytes(200, 100))
    (task,), _ = open_tasks(run)
    (notice,) = image_notices(task)
    assert notice.startswith("1 of 6 images have a shape that the server resizes itself, with torchvision")
