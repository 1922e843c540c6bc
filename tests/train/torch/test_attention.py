"""Packed rows in PyTorch: no implementation of attention lets a document see another, a layer see past its window, or
padding matter."""

import numpy as np
import pytest
import torch

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.recipe.backends import BACKENDS
from gemsmith.recipe.load import build_recipe
from gemsmith.train.torch import attention as trl_attention
from gemsmith.train.torch.attention import FULL, SLIDING, attend_documents, attention_inputs, dense_mask, kernels
from gemsmith.train.torch.model import load_base

CPU = torch.device("cpu")
# Two documents that share a block, one longer than a block and a window, a short one, padding; and a row without
# padding.
LENGTHS = ([30, 50, 200, 7], [300])
TOTAL, WINDOW = 300, 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(trl_attention, "_BLOCK", 100)


def segments_of(lengths):
    rows = [np.repeat(np.arange(1, len(row) + 1), row) for row in lengths]
    return np.stack([np.pad(row, (0, TOTAL - len(row))) for row in rows]).astype(np.int32)


def test_a_mask_lets_a_token_see_its_document_up_to_the_window():
    mask = dense_mask(np.array([[1, 1, 1, 2, 2, 0]]), None, 2)[0]
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def images_of(*spans):
    """The numbers of images of a first row, which stand at these places, and of a second one that is an image."""
    numbers = np.zeros((2, TOTAL), np.int32)
    for number, (begin, end) in enumerate(spans, start=1):
        numbers[0, begin:end] = number
    numbers[1, 3:297] = 1
    return numbers


# Two that touch, one over the end of a window's block, one longer than the window, one at a document's end.
IMAGES = images_of((2, 9), (9, 15), (35, 60), (95, 120), (150, 250), (282, 287))


def test_an_image_is_seen_whole_from_within_and_from_nowhere_before():
    mask = dense_mask(np.array([[1, 1, 1, 1, 1, 1, 2]]), np.array([[0, 1, 1, 2, 2, 0, 2]]), 3)[0]
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


def test_the_window_of_a_long_image_ends_behind_a_token_and_not_before_it():
    mask = dense_mask(np.ones((1, 6), np.int32), np.ones((1, 6), np.int32), 2)[0]
    assert mask.astype(int).tolist() == [[0] * max(0, row - 1) + [1] * (6 - max(0, row - 1)) for row in range(6)]


@pytest.mark.parametrize("kind", [FULL, SLIDING])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("images", [None, IMAGES], ids=["text", "images"])
def test_documents_one_by_one_give_what_a_mask_over_the_row_gives(kind, groups, images):
    torch.manual_seed(0)
    segments = segments_of(LENGTHS)
    heads = 2 * groups
    query, key, value = (
        torch.randn(2, count, TOTAL, 16, dtype=torch.float64, requires_grad=True) for count in (heads, 2, 2)
    )
    blocks = attention_inputs("documents", segments, images, WINDOW, CPU, torch.float64)[kind]
    ours, _ = attend_documents(None, query, key, value, blocks, scaling=1.0)
    seen, reach = (images, WINDOW) if kind == SLIDING else (None, TOTAL)
    mask = torch.from_numpy(dense_mask(segments, seen, reach))[:, None]
    many = [x.repeat_interleave(groups, dim=1) for x in (key, value)]
    whole = torch.nn.functional.scaled_dot_product_attention(query, *many, mask, scale=1.0).transpose(1, 2)
    real = torch.from_numpy(segments > 0)
    assert (ours[~real] == 0).all()
    torch.testing.assert_close(ours[real], whole[real], rtol=1e-12, atol=1e-12)
    above = torch.randn_like(ours[real])
    for mine, theirs in zip(
        *(torch.autograd.grad(out[real], (query, key, value), above) for out in (ours, whole)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_the_gradient_of_queries_is_no_sum_of_whole_tensors(kind):
    """As that of slices would be: each fills a tensor of the row's size."""
    query, key, value = (torch.randn(2, 2, TOTAL, 16, requires_grad=True) for _ in range(3))
    blocks = attention_inputs(
        "documents", segments_of(LENGTHS), None, WINDOW if kind == SLIDING else TOTAL, CPU, torch.float32
    )[kind]
    with torch.profiler.profile() as profile:
        attend_documents(None, query, key, value, blocks, scaling=1.0)[0].sum().backward()
    sliced = sum(event.name == "aten::slice_backward" for event in profile.events())
    # Keys and values of a long document's blocks overlap where there is a window.
    assert sliced == (2 * sum(len(row) for row in blocks) if kind == SLIDING else 0)


def test_a_row_of_padding_leaves_no_matrix_without_a_gradient():
    """Processes add up the gradients that each of them has: one that lacked some would be waited for, or add to another
    matrix."""
    query, key, value = (torch.randn(1, 2, TOTAL, 16, requires_grad=True) for _ in range(3))
    blocks = attention_inputs("documents", np.zeros((1, TOTAL), np.int32), None, TOTAL, CPU, torch.float32)[FULL]
    attend_documents(None, query, key, value, blocks, scaling=1.0)[0].sum().backward()
    assert all(x.grad is not None for x in (query, key, value))


def test_blocks_cover_each_document_once_and_reach_no_further_than_they_must():
    for row in attention_inputs("documents", segments_of(LENGTHS), None, WINDOW, CPU, torch.float32)[SLIDING]:
        assert [block.begin for block in row[1:]] == [block.end for block in row[:-1]]
        assert all(block.begin - block.first < WINDOW for block in row)


def test_no_border_of_blocks_is_in_an_image_and_global_layers_know_of_none():
    inputs = attention_inputs("documents", segments_of(LENGTHS), IMAGES, WINDOW, CPU, torch.float32)
    for row, numbers in zip(inputs[SLIDING], IMAGES, strict=True):
        borders = [block.begin for block in row[1:]]
        assert borders and not any(numbers[at] and numbers[at] == numbers[at - 1] for at in borders)
    plain = attention_inputs("documents", segments_of(LENGTHS), None, WINDOW, CPU, torch.float32)
    assert [[block.mask is None for block in row] for row in inputs[FULL]] == [
        [block.mask is None for block in row] for row in plain[FULL]
    ]


def model_of(checkpoint, implementation):
    train = {"backend": "trl", "dtype": "float32", "remat": "none"}
    recipe = build_recipe({"checkpoint": str(checkpoint), "data": {"train": "not read"}, "train": train})
    return load_base(recipe, open_checkpoint(str(checkpoint)), implementation, CPU, vision=False)


def hidden(model, implementation, tokens, segments):
    """What the model makes of rows, and the gradient-free sum of all tokens' nll."""
    positions = np.concatenate(
        [np.arange(count) for _, count in zip(*np.unique(segments, return_counts=True), strict=True)]
    )
    mask = attention_inputs(
        implementation, segments[None], None, model.config.get_text_config().sliding_window, CPU, torch.float32
    )
    inputs = {
        "input_ids": torch.tensor(tokens)[None],
        "position_ids": torch.tensor(positions)[None],
        "attention_mask": mask,
    }
    with torch.no_grad():
        return model.model.language_model(**inputs, use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("implementation", BACKENDS["trl"].attentions)
@pytest.mark.parametrize(
    "variant",
    ["tiny-31b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-e2b", "tiny-26b-a4b", "tiny-12b"))],
)
def test_no_document_sees_another(tiny_checkpoint, variant, implementation):
    """Alone, first in a row or second, a document gets the same hidden states; what stands in the other changes
    nothing."""
    model = model_of(tiny_checkpoint(variant), implementation)
    random = np.random.default_rng(0)
    first, second, other = (random.integers(108, 1024, length) for length in (90, 110, 90))
    packed = np.repeat([1, 2], [90, 110])
    together = hidden(model, implementation, np.concatenate([first, second]), packed)
    beside_another = hidden(model, implementation, np.concatenate([other, second]), packed)
    alone = hidden(model, implementation, second, np.ones(110, np.int64))
    # Measured: 5.2e-5 at most, in sums over a whole row under a mask; what one document changes in itself is over 0.1.
    torch.testing.assert_close(together[90:], beside_another[90:], rtol=0, atol=1e-4)
    torch.testing.assert_close(together[90:], alone, rtol=0, atol=1e-4)
    assert (together[:90] - beside_another[:90]).abs().max() > 0.1


def test_the_record_names_the_kernel_of_each_type_of_layer():
    heads = {SLIDING: (4, 2, 256), FULL: (4, 1, 512)}
    assert kernels("eager", heads, CPU, torch.float32) == dict.fromkeys(heads, "eager: matmul and softmax")
    for implementation in ("documents", "sdpa"):
        found = kernels(implementation, heads, CPU, torch.float32)
        assert found[FULL] == f"{implementation}: torch's flash_attention kernel, head_dim 512"
