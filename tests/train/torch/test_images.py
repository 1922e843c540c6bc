"""Images of packed rows: whose soft token is whose, in what order and padding, and runs that learn from them."""

import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import read_peft_adapter
from gemsmith.data.batches import load_batches
from gemsmith.errors import DataError
from gemsmith.images.patches import PatchConfig, Patches
from gemsmith.runs.run import Run
from gemsmith.train.inputs import ImageFeed
from gemsmith.train.stage import train
from gemsmith.train.torch.checkpoints import PeftCheckpoints
from gemsmith.train.torch.images import count_patches, number_images, pad_images
from gemsmith.train.torch.model import load_base
from support.images import image_bytes

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, at import


@pytest.fixture(autouse=True, scope="module")
def one_thread_of_torch():
    """Of something as small as this; on a busy machine two wait for each other by spinning."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def image(soft_tokens, value=0.0):
    count = 4 * soft_tokens
    return Patches(
        values=np.full((count, 3), value, np.float32),
        positions=np.full((count, 2), 7, np.int32),
        soft_tokens=soft_tokens,
    )


def test_images_are_told_apart_also_where_nothing_stands_between_them():
    tokens = np.array([[2, 9, 9, 9, 3, 9, 4], [2, 3, 4, 0, 0, 0, 0]])
    numbers = number_images(tokens, [[image(2), image(1), image(1)], []], 9)
    assert numbers.tolist() == [[0, 1, 1, 2, 0, 3, 0], [0] * 7]


@pytest.mark.parametrize("images", [[], [image(2)], [image(2), image(2)]])
def test_soft_tokens_without_an_image_and_images_without_soft_tokens_are_refused(images):
    with pytest.raises(DataError, match=r"a packed row has 3 soft tokens, and images of \d; write the rows again"):
        number_images(np.array([[9, 9, 9, 2]]), [images], 9)


def test_images_are_padded_to_the_largest_in_the_order_of_their_soft_tokens():
    arrays = pad_images([[image(1, 0.1), image(2, 0.2)], [], [image(1, 0.3)]])
    values, positions = arrays["pixel_values"], arrays["image_position_ids"]
    assert values.shape == (3, 8, 3) and positions.shape == (3, 8, 2)
    assert values[:, 0, 0].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert (positions == -1).all(-1).sum(-1).tolist() == [4, 0, 4] and (values[0, 4:] == 0).all()
    assert pad_images([[], []]) == {}


class Batch:
    """Rows of which only the soft tokens of their images are looked at."""

    def __init__(self, *rows):
        self.images = [[SimpleNamespace(soft_tokens=count) for count in row] for row in rows]

    def __len__(self):
        return len(self.images)


def test_padding_is_counted_for_each_part_of_a_step():
    batch = Batch([2, 3], [3], [], [1, 5])
    assert count_patches(batch, 1).tolist() == [14, 25] and count_patches(batch, 2).tolist() == [14, 9 + 10]


def test_a_image_that_is_gone_is_known_a_step_before_it_is_asked_for(prepare_images, in_this_process, tmp_path):
    run = prepare_images("run", data={"packing": False}, train={"global_batch_size": 1, "max_steps": 7})
    batches, patching = load_batches(run), PatchConfig(budget=70, patch=4)
    paths = [[image.path for image in batches.batch(step).images[0]] for step in range(1, 8)]
    gone = next(step for step in range(3, 8) if len(paths[step - 1]) == 1)
    Path(paths[gone - 1][0]).unlink()
    feed = ImageFeed(batches, patching, rows=range(1), first=gone - 2, processes=1, ahead=1)
    with closing(feed):
        assert feed.fault is None
        for step in (gone - 2, gone - 1):
            assert feed.fault is None
            assert len(feed.take()[1][0]) == len(paths[step - 1])
        assert feed.step == gone
        assert isinstance(feed.fault, DataError) and "does not exist, or not a file" in str(feed.fault)


@pytest.fixture
def learned(prepare_images, in_this_process):
    """Returns a run that was trained on rows with images, and its record."""

    def make(folder="run", **keys):
        run = prepare_images(folder, **keys)
        return run, train(run)

    return make


def test_a_run_learns_from_images_and_counts_them(learned):
    run, record = learned(train={"max_steps": 6})
    assert record.steps[-1].loss < record.steps[0].loss - 0.5
    batches = load_batches(run)
    for step in record.steps:
        seen = [image for images in batches.batch(step.step).images for image in images]
        assert (step.images, step.soft_tokens) == (len(seen), sum(image.soft_tokens for image in seen))
    assert record.images.seen == sum(step.images for step in record.steps) >= 6
    assert record.images.soft_tokens == sum(step.soft_tokens for step in record.steps)
    assert record.images.per_s > 0 and 0 < record.images.padding_fraction < 0.2
    assert all("language_model" in module for module in read_peft_adapter(run.checkpoints / "6").modules)


@pytest.mark.slow
def test_what_a_image_shows_is_learned(learned, tmp_path):
    """The same rows with images of one color: the loss of a step that sees other images is another one."""
    first = learned("first", train={"max_steps": 2})[1]
    for number in range(6):
        file = tmp_path / "images" / f"{number}.png"
        with Image.open(file) as opened:
            Image.new("RGB", opened.size, (200, 0, 0)).save(file)
    second = learned("second", train={"max_steps": 2})[1]
    assert [step.soft_tokens for step in first.steps] == [step.soft_tokens for step in second.steps]
    assert abs(first.steps[0].loss - second.steps[0].loss) > 1e-3


@pytest.mark.parametrize("thought", ["", "<|channel>thought\\n<channel|>"], ids=["plain", "empty thought"])
def test_nothing_but_the_answer_and_its_end_is_a_target(prepare_images, in_this_process, tmp_path, thought):
    """No header, no soft token, none of the marks around them, and none of the empty thought of the larger variants."""
    own = prepare_images("own").recipe.checkpoint
    header = "{{- '<|turn>model\\n' -}}"
    text = (Path(own) / "chat_template.jinja").read_text()
    assert header in text
    (tmp_path / "template.jinja").write_text(text.replace(header, header.replace("' -}}", f"{thought}' -}}}}")))
    run = prepare_images("run", data={"template": str(tmp_path / "template.jinja")})
    tokenizer = Tokenizer.from_file(str(Path(run.recipe.checkpoint) / "tokenizer.json"))
    rows, texts = load_batches(run).rows, []
    for number in range(len(rows)):
        for place in rows.documents(number):
            tokens, targets = (getattr(rows, name)[number, place] for name in ("tokens", "loss_mask"))
            texts.append(tokenizer.decode(tokens[targets > 0].tolist(), skip_special_tokens=False))
    assert sorted(texts) == sorted(["wire<turn|>", *[f"wire {number % 2}<turn|>" for number in range(6)]])


@pytest.mark.slow
def test_a_image_that_changes_in_training_is_one_line_and_the_step_before_it_is_saved(
    prepare_images, in_this_process, tmp_path
):
    keys = {"global_batch_size": 1, "max_steps": 7}
    run = prepare_images("run", data={"packing": False}, train=keys)
    batches = load_batches(run)
    step, path = next(
        (step, images[0].path)
        for step in range(4, 8)
        if (images := batches.batch(step).images[0]) and images[0].path not in _paths(batches, range(1, step))
    )
    kept = Path(path).read_bytes()
    Path(path).write_bytes(image_bytes(9, 9, seed=99))
    with pytest.raises(DataError, match=rf"^step {step} of training: .* has changed .*; step {step - 1} is saved$"):
        train(run)
    assert PeftCheckpoints(run).steps()[-1] == step - 1
    Path(path).write_bytes(kept)
    record = train(run)
    assert record.resumed_at == (step - 1,) and len(record.steps) == 7


def _paths(batches, steps):
    return {image.path for step in steps for image in batches.batch(step).images[0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-12b"])
def test_a_run_that_is_stopped_anywhere_ends_with_the_bytes_of_one_that_is_not(
    prepare_images, tmp_path, saved_bytes, same_numbers, name
):
    keys = {"save_steps": 1, "save_total_limit": 9, "max_steps": 5, "remat": "layer"}
    run = prepare_images("whole", name=name, train=keys)
    whole = train(run)
    for step in (1, 4):
        shutil.copytree(run.path, tmp_path / f"from-{step}")
        again = Run(path=tmp_path / f"from-{step}", recipe=run.recipe)
        again.record_file("train").unlink()
        for later in range(step + 1, 6):
            shutil.rmtree(again.checkpoints / str(later))
        record = train(again)
        assert same_numbers(record, whole) and record.resumed_at == (step,)
        assert saved_bytes(again, 5) == saved_bytes(run, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tiny-31b", {"remat": "layer"}),
        ("tiny-31b", {"attention": "sdpa"}),
        ("tiny-12b", {"attention": "eager"}),
        ("tiny-e2b", {"gradient_accumulation_steps": 2}),
    ],
)
def test_how_a_step_is_computed_changes_nothing_but_rounding(learned, name, keys):
    plain, other = (
        learned(folder, name=name, lora={"dropout": 0.0}, train=more)[1] for folder, more in (("a", {}), ("b", keys))
    )
    assert [step.loss for step in other.steps] == pytest.approx([step.loss for step in plain.steps], rel=1e-5)
    assert [step.grad_norm for step in other.steps] == pytest.approx([step.grad_norm for step in plain.steps], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-31b", "tiny-12b"])
@pytest.mark.parametrize("targets", [["q", "vision"], ["all-linear"]], ids=["vision", "all-linear"])
def test_adapters_on_the_tower_learn_and_go_on_with_the_same_bytes(
    prepare_images, tmp_path, saved_bytes, name, targets
):
    if (name, targets) == ("tiny-12b", ["q", "vision"]):
        pytest.skip("it has no tower")
    keys = {"lora": {"targets": targets}, "train": {"remat": "layer", "save_steps": 2, "dtype": "bfloat16"}}
    run = prepare_images("run", name=name, **keys)
    record = train(run)
    assert record.steps[-1].loss < record.steps[0].loss
    assert record.adapted["vision"] == (22 if name == "tiny-31b" else 1)
    modules = read_peft_adapter(run.checkpoints / "4").modules
    assert len(modules) == sum(record.adapted.values()) and all(pair.b.any() for pair in modules.values())
    shutil.copytree(run.path, tmp_path / "again")
    again = Run(path=tmp_path / "again", recipe=run.recipe)
    again.record_file("train").unlink()
    shutil.rmtree(again.checkpoints / "4")
    assert train(again).resumed_at == (2,) and saved_bytes(again, 4) == saved_bytes(run, 4)


@pytest.mark.slow
def test_a_base_in_nf4_keeps_what_embeds_images_as_it_is(learned):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    run, record = learned(train={"dtype": "nf4", "remat": "layer"})
    assert record.steps[-1].loss < record.steps[0].loss - 0.1
    checkpoint = open_checkpoint(run.recipe.checkpoint)
    model = load_base(run.recipe, checkpoint, "documents", torch.device("cpu"), vision=True)
    quantized = {name for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)}
    assert len(quantized) == 40 and all(".language_model.layers." in name for name in quantized)
    assert model.model.vision_tower.patch_embedder.input_proj.weight.dtype == torch.bfloat16
    twice = run.recipe.override({"train.double_quant": True, "export.merge_into": "original"})
    held = (model, load_base(twice, checkpoint, "documents", torch.device("cpu"), vision=True))
    scales = [each.model.language_model.layers[0].mlp.up_proj.weight.quant_state for each in held]
    assert [(scale.nested, scale.absmax.dtype) for scale in scales] == [(False, torch.float32), (True, torch.uint8)]
