"""Requests that carry an image: what is sent, what the record says of it, and rows that are refused."""

import base64
import itertools
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gemsmith.bench.cell import plan_cells
from gemsmith.bench.requests import read_image_rows
from gemsmith.bench.stage import bench, bench_url, keeps_images
from gemsmith.errors import DataError, MachineError
from gemsmith.images.check import sent_rgb
from gemsmith.images.decode import make_rgb
from gemsmith.recipe.load import with_values
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.run import Run, read_record, stage_keys
from gemsmith.serve.settings import find_vllm
from gemsmith.serve.stage import Servers

pytestmark = pytest.mark.usefixtures("prompts_read_here")
SWEEP = {"images": True, "output_tokens": 16, "request_rates": [2, 8], "prompts": 12}


def sent(file: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["content"] for line in file.read_text().splitlines()]


def test_every_row_is_asked_before_one_is_asked_again_with_the_pixels_of_training(
    photo_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = photo_run({"bench": SWEEP})
    rows = read_image_rows(run.recipe)
    assert len(rows.documents) == 6 and max(ask.requests for ask in plan_cells(run.recipe.bench, 0)) == 16
    rows.write_requests(tmp_path / "requests", requests=16, seed=1)
    requests = sent(tmp_path / "requests")
    urls = [content[0]["image_url"]["url"] for content in requests]
    assert [len({*urls[place : place + 6]}) for place in (0, 6)] == [6, 6] and urls[:6] == urls[6:12]
    assert [part["type"] for part in requests[0]] == ["image_url", "text"]
    assert requests[0][1]["text"] == "Which is it: great dane, sphynx?"
    files = [Path(image.path) for row in rows.documents for image in row.images]
    trained = {sent_rgb(make_rgb(file.read_bytes()), rows.patching).tobytes() for file in files}
    assert {Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))).tobytes() for url in urls} == trained
    rows.write_requests(tmp_path / "others", requests=16, seed=2)
    assert (tmp_path / "others").read_text() != (tmp_path / "requests").read_text()


def test_lengths_are_those_that_training_makes_of_the_prompts(photo_run: Callable[..., Run]) -> None:
    rows = read_image_rows(photo_run({"bench": SWEEP}).recipe)
    found = rows.describe(encoder_cache=False)
    soft_tokens = [image.soft_tokens for row in rows.documents for image in row.images]
    assert (found.rows, found.distinct, found.images_per_request) == (6, 6, 1.0)
    assert found.soft_tokens == round(float(np.mean(soft_tokens)), 2) and len({*soft_tokens}) > 1
    text = {length - count for length, count in zip(rows.lengths, soft_tokens, strict=True)}
    assert text == {found.text_tokens}, "all rows have one prompt"


def test_bench_records_what_requests_held_and_measures_chats(
    fake_vllm: Callable[..., Path], photo_run: Callable[..., Run], result: dict[str, Any]
) -> None:
    fake_vllm(results=[result] * 2)
    run = photo_run({"bench": SWEEP})
    with Servers(run) as servers:
        assert not keeps_images(servers.tuned().command)
        record = bench(run, servers)
    assert record == read_record(run, BenchRecord) and record.images is not None
    assert record.images.encoder_cache is False and record.prefix_caching is False
    rows = read_image_rows(run.recipe)
    mean_tokens = sum(rows.lengths) / len(rows.lengths)
    assert {cell.input_tokens for cell in record.cells} == {round(mean_tokens)} and len(record.cells) == 2
    assert not any("text alone" in notice for notice in record.warnings)
    handed = [json.loads(line) for line in (run.logs / "bench" / "asked.jsonl").read_text().splitlines()]
    told = dict(itertools.pairwise(handed[0]["arguments"]))
    assert (told["--backend"], told["--endpoint"]) == ("openai-chat", "/v1/chat/completions")
    assert told["--dataset-name"] == "custom_image" and record.command[3:5] == ("--backend", "openai-chat")


def test_that_times_are_of_text_is_said_where_images_are_served(
    fake_vllm: Callable[..., Path], photo_run: Callable[..., Run], result: dict[str, Any]
) -> None:
    fake_vllm(results=[result])
    sweep = {"input_tokens": [16], "output_tokens": 16, "request_rates": [2], "prompts": 12, "images": False}
    with Servers(run := photo_run({"bench": sweep})) as servers:
        record = bench(run, servers)
    assert any("text alone" in notice and "bench.images: true" in notice for notice in record.warnings)


def test_of_a_server_of_others_it_is_not_known_what_it_keeps(
    fake_vllm: Callable[..., Path], photo_run: Callable[..., Run], result: dict[str, Any], tmp_path: Path
) -> None:
    fake_vllm(results=[result] * 2)
    run = photo_run({"bench": SWEEP})
    with Servers(run) as servers:
        url, folder = servers.tuned().url, Path(run.recipe.checkpoint)
        record = bench_url(run.path, [], url=url, model="demo", tokenizer=folder, out=tmp_path / "bench.json")
    assert record.images is not None and record.images.encoder_cache is None
    assert any("keeps what it made of an image" in notice for notice in record.warnings)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [("user", "hi"), ("assistant", "a")]}, r"line 1: has no image, and bench\.images needs one"),
        ({"messages": [("system", "s"), ("user", "▣"), ("assistant", "a")]}, "has turns system, user, assistant; "),
        (
            {"messages": [("user", "▣" + "w " * 600), ("assistant", "a")]},
            r"its prompt has \d+ tokens, more than .* 256;",
        ),
    ],
)
def test_rows_that_are_no_question_with_a_image_are_one_line(
    row: dict[str, Any], reason: str, photo_run: Callable[..., Run], tmp_path: Path
) -> None:
    image = {"type": "image", "path": str(tmp_path / "pets" / "sphynx" / "0.png")}
    messages = [
        {"role": role, "content": [*([image] if "▣" in text else []), {"type": "text", "text": text.replace("▣", "")}]}
        for role, text in row["messages"]
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": messages, "labels": ["a"]}) + "\n")
    rows = {"train": str(file), "eval": str(file), "format": "messages", "prompt": None, "held_out": 0.0}
    run = photo_run({"data": rows | {"max_length": 256}, "bench": SWEEP})
    with pytest.raises(DataError, match=reason):
        read_image_rows(run.recipe)


@pytest.mark.vllm
def test_a_model_that_sees_is_measured_with_images(
    photo_run: Callable[..., Run],
) -> None:
    """The real vLLM: prompts are as long as training makes them, and every answer has all its tokens."""
    try:
        find_vllm()
    except MachineError as error:
        pytest.skip(str(error))
    run = photo_run({"bench": SWEEP | {"request_rates": [4]}, "serve": {"dtype": "float32"}})
    rows = read_image_rows(run.recipe)
    with Servers(run) as servers:
        record = bench(run, servers)
    (cell,) = record.cells
    assert (cell.completed, cell.failures, cell.warmup_failures) == (12, {}, {})
    assert min(rows.lengths) <= cell.real_input_tokens <= max(rows.lengths)
    assert cell.real_input_tokens == pytest.approx(sum(rows.lengths) / len(rows.lengths), abs=3)
    result = json.loads(next((run.logs / "bench").glob("01-*rps.json")).read_text())
    assert {*result["input_lens"]} == {*rows.lengths}, "as many tokens as training makes of each"
    longest = max(len(itls) for itls in result["itls"])
    assert longest == SWEEP["output_tokens"] - 1, "a message may hold several tokens"
    assert record.prefix_caching is False and record.images is not None and not record.images.encoder_cache


def test_bench_reads_the_held_out_rows_only_where_it_sends_them(photo_run: Callable[..., Run]) -> None:
    recipe = photo_run({"bench": SWEEP}).recipe
    assert {"data.eval", "data.image_tokens", "bench.images"} <= stage_keys(recipe, "bench").keys()
    text = with_values(recipe, [("bench.images", False)])
    assert not {"data.eval", "data.prompt"} & stage_keys(text, "bench").keys()
