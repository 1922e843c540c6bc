"""Rows with images through the data stage: placed, masked, packed, shown and decoded again, the bad ones counted."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gemsmith import pipeline
from gemsmith.data import stage
from gemsmith.data.batches import IMAGES, load_batches, open_rows
from gemsmith.data.images import decode_batches
from gemsmith.data.preview import show
from gemsmith.data.stage import prepare_data
from gemsmith.data.tokenize import open_renderer, render_documents
from gemsmith.errors import CheckpointError, DataError, RunError
from gemsmith.images import workers
from gemsmith.images.decode import make_rgb
from gemsmith.images.patches import PatchConfig, count_soft_tokens, make_patches
from gemsmith.runs.run import is_up_to_date
from gemsmith.system.console import open_console
from support.images import image_bytes, unusable_images, usable_images

PATCHING = PatchConfig(budget=70, patch=4)
IMAGE, BEGIN, END = 10, 11, 12
SIZES = {"wide": (40, 10), "square": (9, 9), "tall": (5, 31)}


@pytest.fixture(autouse=True)
def _in_this_process(request, monkeypatch):
    """Renders and decodes here, but for tests that ask for `in_processes`: each would take a second to start some."""

    @contextmanager
    def open_workers(processes):
        with ThreadPoolExecutor(processes) as threads:
            yield threads.submit

    if "in_processes" not in request.fixturenames:
        monkeypatch.setattr(workers, "open_workers", open_workers)
        monkeypatch.setattr(
            stage,
            "render_in_processes",
            lambda folder, template, documents, _, on_bad: render_documents(
                open_renderer(folder, template), [*documents], on_bad
            ),
        )


@pytest.fixture
def in_processes():
    """Asked for by a test that starts the processes."""


@pytest.fixture
def images(tmp_path):
    for name, size in SIZES.items():
        (tmp_path / f"{name}.png").write_bytes(image_bytes(*size))
    return tmp_path


@pytest.fixture
def prepared(make_run, write_rows, image_checkpoint):
    """Returns a run over these rows, prepared: `prepared(row, row, data={...})`."""

    def make(*rows, data=None, train=None, name="run"):
        values = {"image_tokens": 70, "max_length": 256} | (data or {})
        source = rows[0] if isinstance(rows[0], Path) else write_rows(*rows)
        run = make_run(source, values, train or {"global_batch_size": 1}, name=name, checkpoint=str(image_checkpoint))
        return run, prepare_data(run)

    return make


def asked(*images, prompt="a", response="wire"):
    return {"prompt": prompt, "response": response, "images": [f"{image}.png" for image in images]}


def soft(name):
    return count_soft_tokens(*SIZES[name], PATCHING)


def test_soft_tokens_stand_between_their_marks_and_are_not_trained_on(prepared, images):
    run, record = prepared(asked("wide", "tall"))
    rows = open_rows(run)
    #           <bos> <|turn> user \n    <|image> …                                        a  <turn|> \n …
    wanted = [2, 105, 393, 107]
    for name in ("wide", "tall"):
        wanted += [BEGIN, *[IMAGE] * soft(name), END]
    wanted += [364, 106, 107, 105, 397, 107, 405, 106, 107]
    assert rows.tokens[0, : len(wanted)].tolist() == wanted
    assert np.flatnonzero(rows.loss_mask[0]).tolist() == [len(wanted) - 3, len(wanted) - 2]
    assert rows.positions[0, : len(wanted)].tolist() == list(range(len(wanted)))
    assert (record.images, record.soft_tokens) == (2, soft("wide") + soft("tall"))
    assert record.tokens == len(wanted) and record.most_patches == 9 * record.soft_tokens


def test_a_row_has_its_images_in_the_order_of_their_soft_tokens(prepared, images):
    names = ["wide", "square", "tall"]
    rows = [asked(*(names[(row + place) % 3] for place in range(row % 3))) for row in range(11)]
    run, record = prepared(*rows, data={"max_length": 400})
    packed = open_rows(run)
    assert record.images == sum(row % 3 for row in range(11)) and len(packed) > 1
    for tokens, row in zip(packed.tokens, packed.images, strict=True):
        begins, ends = np.flatnonzero(tokens == BEGIN), np.flatnonzero(tokens == END)
        assert (ends - begins - 1).tolist() == [image.soft_tokens for image in row]
        assert np.count_nonzero(tokens == IMAGE) == sum(image.soft_tokens for image in row)
        for image in row:
            assert image.soft_tokens == soft(Path(image.path).stem)


def test_several_turns_may_have_images(prepared, images):
    def turn(name, *words):
        return {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "path": f"{name}.png"}]}

    answer = {"role": "assistant", "content": "b"}
    run, record = prepared({"messages": [turn("tall"), answer, turn("square"), answer]})
    [images] = open_rows(run).images
    assert [Path(image.path).stem for image in images] == ["tall", "square"]
    assert record.supervised_tokens == 4


def test_a_row_holds_no_more_patches_than_the_recipe_says(prepared, images):
    rows = [asked("square", response="b" * (number + 1)) for number in range(7)] + [{"prompt": "a", "response": "b"}]
    limit = 9 * 2 * soft("square")
    run, record = prepared(*rows, data={"max_patches": limit, "max_length": 1024})
    assert [len(images) for images in open_rows(run).images] == [2, 2, 2, 1] and record.most_patches == limit
    assert record.dropped == {}


def test_a_document_of_too_many_patches_is_counted_or_an_error(prepared, images):
    rows, data = [asked("square"), asked("square", "square")], {"max_patches": 9 * 70}
    assert prepared(*rows, data=data)[1].dropped == {"too_many_patches": 1}
    with pytest.raises(DataError, match=r"line 2: has 1152 patches, data.max_patches is 630; raise it, or set"):
        prepared(*rows, data=data | {"on_too_long": "error"}, name="error")


@pytest.mark.parametrize("spelling", ["<|image|>", "<|image>", "<image|>"])
def test_text_that_spells_a_placeholder_stays_refused(spelling, prepared, images):
    with pytest.raises(DataError) as error:
        prepared(asked("wide", prompt=f"a {spelling} b"))
    assert f"prompt holds {spelling}, a control token that only the chat template may write" in str(error.value)


def test_a_text_that_makes_a_placeholder_beside_another_part_is_refused(prepared, images):
    parts = [{"type": "text", "text": "<|image"}, {"type": "image", "path": "wide.png"}]
    row = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "|>"}]}]}
    row["messages"].append({"role": "assistant", "content": "b"})
    with pytest.raises(DataError):
        prepared(row)


@pytest.mark.parametrize("written", ["''", "'<|image|><|image|>'"])
def test_a_template_that_does_not_write_each_image_once_is_refused(written, prepared, images, image_checkpoint):
    text = (image_checkpoint / "chat_template.jinja").read_text()
    template = images / "own.jinja"
    template.write_text(text.replace("'<|image|>' if", f"{written} if"))
    with pytest.raises(DataError, match="does not write the image placeholder once for each image"):
        prepared(asked("wide"), data={"template": str(template)})


# Writes a turn's images two turns later.
LATE = """{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}
{%- if loop.index0 > 1 and messages[loop.index0 - 2].content is not string %}
{%- for p in messages[loop.index0 - 2].content %}{{ '<|image|>' if p.type == 'image' }}{% endfor %}{% endif %}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""


def test_a_template_that_writes_a_image_after_the_answer_to_it_is_refused(prepared, images):
    (images / "late.jinja").write_text(LATE)
    answer, again = {"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}
    first = {"role": "user", "content": [{"type": "image", "path": "wide.png"}, {"type": "text", "text": "a"}]}
    row = {"messages": [first, answer, again, answer]}
    with pytest.raises(
        DataError, match=r"does not write the image placeholder once for each image, in its place \(1 for 1\)"
    ):
        prepared(row, data={"template": str(images / "late.jinja")})


def test_shown_rows_count_a_images_soft_tokens(prepared, images):
    run, _ = prepared(asked("square", prompt="add"))
    stream = io.StringIO()
    show(run, 1, console=open_console(file=stream, width=400))
    assert f"<|turn>user\n<|image>▣ {soft('square')}<image|>add<turn|>" in stream.getvalue()
    assert "⟦wire<turn|>⟧" in stream.getvalue()


def test_the_patches_of_a_step_are_those_of_its_rows(prepared, images, in_processes):
    rows = [asked(*["wide", "square", "tall"][: row % 4]) for row in range(9)]
    run, _ = prepared(*rows, train={"global_batch_size": 2, "epochs": 2})
    batches, again = load_batches(run), []
    for rows_of_step, patches in decode_batches(batches, range(1, batches.steps + 1), PATCHING, processes=1):
        again.append(len(rows_of_step.tokens))
        assert len(patches) == 2
        for tokens, seen in zip(rows_of_step.tokens, patches, strict=True):
            assert np.count_nonzero(tokens == IMAGE) == sum(one.soft_tokens for one in seen)
    assert sum(again) == 2 * batches.steps


def test_a_steps_patches_are_the_files(prepared, images):
    run, _ = prepared(asked("tall"))
    [(_, [[patches]])] = decode_batches(load_batches(run), [1], PATCHING, processes=1)
    plain = make_patches(make_rgb((images / "tall.png").read_bytes()), PATCHING)
    assert np.array_equal(patches.values, plain.values) and patches.values.dtype == np.float32


def test_images_that_came_as_bytes_are_files_of_the_run_which_may_move(prepared, images, tmp_path):
    import pyarrow
    import pyarrow.parquet

    values = {
        "prompt": ["a", "a"],
        "response": ["b", "b"],
        "image": [image_bytes(9, 9, seed=seed) for seed in (0, 1)],
    }
    pyarrow.parquet.write_table(pyarrow.table(values), tmp_path / "rows.parquet")
    run, _ = prepared(tmp_path / "rows.parquet")
    assert len([*run.images.iterdir()]) == 2
    moved = type(run)(path=run.path.rename(tmp_path / "moved"), recipe=run.recipe)
    [(_, [[*patches]])] = decode_batches(load_batches(moved), [1], PATCHING, processes=1)
    assert len(patches) == 2


def test_every_usable_kind_is_trained_on_and_every_other_counted_by_its_reason(prepared, tmp_path, in_processes):
    good, bad = usable_images(), unusable_images()
    for name, (data, _) in {**good, **bad}.items():
        (tmp_path / f"{name}.png").write_bytes(data)
    _, record = prepared(*(asked(name) for name in (*good, *bad, "gone")), data={"on_bad_image": "drop"})
    reasons = [reason for _, reason in bad.values()] + ["missing"]
    assert record.dropped == {f"image {reason}": reasons.count(reason) for reason in dict.fromkeys(reasons)}
    assert record.rows == len(good) and sum(record.dropped.values()) == len(bad) + 1
    first, animated, thin = record.warnings
    assert first.startswith(f"data.train: rows left out for an image that cannot be used: {len(bad) + 1} (")
    assert animated.endswith("of which the first is used: 1") and thin.endswith("squeezed: 1")


def test_a_bad_image_is_an_error_unless_the_recipe_says_drop(prepared, images):
    (images / "half.png").write_bytes(image_bytes(64, 64)[:200])
    with pytest.raises(DataError) as error:
        prepared(asked("wide"), asked("wide", "half"))
    assert str(error.value).startswith(f"data.train, rows.jsonl line 2: {images}/half.png cannot be decoded (")
    assert str(error.value).endswith("; mend it, take the row out, or set data.on_bad_image to drop")


def test_no_row_left_is_an_error(prepared, images):
    with pytest.raises(DataError, match=r"each of its 1 rows has an image that cannot be used \(the first, rows.jsonl"):
        prepared(asked("gone"), data={"on_bad_image": "drop"})


def test_a_image_that_changed_after_the_data_stage_is_one_line(prepared, images):
    run, _ = prepared(asked("wide"))
    (images / "wide.png").write_bytes(image_bytes(seed=5))
    with pytest.raises(DataError, match=r"wide.png: has changed since its row was read"):
        list(decode_batches(load_batches(run), [1], PATCHING, processes=1))


def test_damaged_lines_of_images_are_told(prepared, images):
    run, _ = prepared(asked("wide"))
    (run.data / IMAGES).write_text("[]\n")
    with pytest.raises(RunError, match=r"images.jsonl: is damaged: its SHA-256 is not the one in"):
        open_rows(run)


def test_the_same_images_elsewhere_are_the_same_rows(prepared, images, tmp_path):
    """A run resumes from a saved step on another machine, whose folders are others."""
    here = prepared(asked("wide"))[1]
    (tmp_path / "elsewhere").mkdir()
    (images / "wide.png").rename(tmp_path / "elsewhere" / "wide.png")
    there = prepared(asked("elsewhere/wide"), name="there")[1]
    assert here.rows_sha256 == there.rows_sha256 and here.files != there.files


def test_the_same_images_give_the_same_rows(prepared, images):
    (run, one), (_, other) = prepared(asked("wide")), prepared(asked("wide"), name="again")
    assert one.rows_sha256 == other.rows_sha256 and is_up_to_date(run, "data")
    (images / "wide.png").write_bytes(image_bytes(40, 10, seed=5))
    assert prepared(asked("wide"), name="changed")[1].rows_sha256 != one.rows_sha256


def test_held_out_rows_with_another_image_are_no_overlap(prepared, images, write_rows):
    held_out = write_rows(asked("tall"), asked("wide"), name="held.jsonl")
    record = prepared(asked("wide"), asked("square"), data={"eval": str(held_out)})[1]
    assert record.held_out_also_trained == 1
    assert record.held_out is not None and record.held_out.same_image == 1
    [notice] = record.warnings
    assert "1 of 2 (held.jsonl line 2)" in notice


def test_a_bad_image_in_held_out_rows_is_an_error_whatever_the_policy(prepared, images, write_rows):
    held_out = write_rows(asked("gone"), name="held.jsonl")
    with pytest.raises(DataError, match=r"data.eval, held.jsonl line 1: .*gone.png does not exist.*; mend it, or take"):
        prepared(asked("wide"), data={"eval": str(held_out), "on_bad_image": "drop"})


def test_a_checkpoint_of_text_alone_refuses_images(make_run, write_rows, images, checkpoint):
    with pytest.raises(CheckpointError, match=r"line 1: has an image, and the config.json .* has no vision_config"):
        prepare_data(make_run(write_rows(asked("wide"))))


def test_a_folder_of_photos_is_prepared(prepared, tmp_path):
    pets, write = tmp_path / "pets", partial(image_bytes, 9, 9)
    for name in ("cat", "dog"):
        (pets / name).mkdir(parents=True)
        for number in range(5):
            (pets / name / f"{number}.png").write_bytes(write(seed=ord(name[0]) + number))
    data = {"format": "image-folder", "prompt": "a", "held_out": 0.2, "eval": str(pets)}
    run, record = prepared(pets, data=data)
    assert (record.rows, record.images, record.held_out_also_trained) == (8, 8, 0)
    assert is_up_to_date(run, "data")
    pipeline.refuse_problems(run, ["data"])
    (pets / "cat" / "9.png").write_bytes(write())
    with pytest.raises(RunError, match=r"pets has changed since .*data.json was made from it"):
        pipeline._refuse_changed_rows(run)


def test_packed_rows_of_a_folder_of_photos_mix_its_classes(prepared, tmp_path):
    """They are read class by class, with answers of other lengths, and so are rows that are not packed."""
    names = ("bag", "boot", "a very long coat")
    for name in names:
        (tmp_path / "shop" / name).mkdir(parents=True)
        for number in range(20):
            (tmp_path / "shop" / name / f"{number}.png").write_bytes(image_bytes(9, 9, seed=number))
    data = {"format": "image-folder", "prompt": "a", "max_length": 512, "max_patches": 100_000}

    def classes(run):
        return [{Path(image.path).parent.name for image in row} for row in open_rows(run).images]

    run, record = prepared(tmp_path / "shop", data=data)
    assert record.packing_order == "drawn" and record.packing_efficiency > 0.9
    # The longest first, it was one: all of a class have one length.
    assert sum(len(row) > 1 for row in classes(run)) >= 9
    other, _ = prepared(tmp_path / "shop", data=data, name="again")
    assert (run.data / "tokens.npy").read_bytes() == (other.data / "tokens.npy").read_bytes()
    alone, record = prepared(tmp_path / "shop", data=data | {"packing": False}, name="alone")
    assert record.packing_order is None and classes(alone) == [{name} for name in sorted(names) for _ in range(20)]


def test_rows_of_text_alone_leave_no_trace_of_images(prepared):
    run, record = prepared({"prompt": "a", "response": "b"})
    assert [*record.files] == ["tokens", "segments", "positions", "loss_mask"] and not run.images.exists()
    assert not open_rows(run).images and json.loads(run.record_file("data").read_text())["images"] == 0
    assert [patches for _, patches in decode_batches(load_batches(run), [1], PATCHING, processes=1)] == [[[]]]
