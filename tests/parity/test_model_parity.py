"""Gemma 4's logits and gradients here and in transformers, from the same weights, fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoModelForImageTextToText

from gemsmith.arch import find_variant, text_tensors
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.models import abstract_model, by_path, load_model
from tiny_checkpoints import make_tokenizer, write_checkpoint

TINY = ("tiny-e2b", *(pytest.param(f"tiny-{name}", marks=pytest.mark.slow) for name in ("31b", "26b-a4b", "12b")))
# The tiny variants' window is 64: SHORT lies within it, LENGTH beyond.
LENGTH, SHORT = 168, 40


@pytest.fixture(scope="module", params=TINY)
def models(request, tmp_path_factory):
    """Both models of one checkpoint in which no norm and no layer scalar is 1."""
    variant = find_variant(request.param)
    random = np.random.default_rng(7)
    folder = tmp_path_factory.mktemp("parity") / variant.name
    write_checkpoint(
        variant, {tensor.name: make_weight(tensor, random) for tensor in text_tensors(variant)}, folder, dtype="float32"
    )
    make_tokenizer(folder)
    reference = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    checkpoint = open_checkpoint(str(folder))
    model = load_model(checkpoint, abstract_model(checkpoint.variant, dtype="float32"))
    return model, nnx.jit(type(model).__call__), reference


def make_weight(tensor, random):
    noise = random.standard_normal(tensor.shape).astype(np.float32)
    if len(tensor.shape) > 1:
        return noise / np.sqrt(tensor.shape[-1])
    # Queries of norm 1 make attention so sharp that transformers' own fp32 is 4e-4 from its fp64; at a quarter it is
    # 1e-5.
    return (0.25 if "q_norm" in tensor.name else 0.9) + 0.1 * noise


def make_tokens(rows, length):
    return np.random.default_rng(1).integers(108, 1024, (rows, length))


def reference_logits(reference, tokens, **inputs):
    with torch.no_grad():
        return reference(input_ids=torch.tensor(tokens), **inputs).logits.numpy()


def count_up(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def test_logits_agree_beyond_the_window_and_within_it(models):
    model, run, reference = models
    tokens = make_tokens(2, LENGTH)
    expected = reference_logits(reference, tokens)
    actual = run(model, tokens, count_up(tokens), jnp.ones_like(tokens))
    # Measured: 5e-6 to 3e-5.
    assert np.abs(actual - expected).max() < 1e-4
    assert np.abs(expected).max() > 1
    assert np.abs(actual[:, :SHORT] - reference_logits(reference, tokens[:, :SHORT])).max() < 1e-4


def test_padded_and_packed_rows_agree_with_each_document_alone(models):
    """First row: two documents, one longer than the window, then padding. Second row: one short document, then
    padding."""
    model, run, reference = models
    tokens = make_tokens(2, LENGTH)
    positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
    documents = []
    for row, sizes in enumerate(((100, 50), (SHORT,))):
        start = 0
        for number, size in enumerate(sizes, start=1):
            positions[row, start : start + size], segments[row, start : start + size] = np.arange(size), number
            documents.append((row, slice(start, start + size)))
            start += size
        tokens[row, start:] = 0
    actual = np.asarray(run(model, tokens, positions, segments))
    for row, place in documents:
        assert np.abs(actual[row, place] - reference_logits(reference, tokens[row : row + 1, place])[0]).max() < 1e-4
    assert np.isfinite(actual).all()


def test_logits_agree_with_a_padded_batch_of_transformers(models):
    model, run, reference = models
    tokens = make_tokens(2, LENGTH)
    mask = np.ones_like(tokens)
    mask[1, SHORT:] = tokens[1, SHORT:] = 0
    expected = reference_logits(reference, tokens, attention_mask=torch.tensor(mask))
    actual = np.asarray(run(model, tokens, count_up(tokens) * mask, mask))
    assert np.abs(actual - expected)[mask == 1].max() < 1e-4


# These two have everything between them: per-layer inputs and shared kv, K = V and experts.
@pytest.mark.slow
@pytest.mark.parametrize("models", ["tiny-e2b", "tiny-26b-a4b"], indirect=True)
def test_every_gradient_of_the_loss_agrees(models):
    model, _, reference = models
    tokens = make_tokens(1, 96)
    reference.zero_grad()
    logits = reference(input_ids=torch.tensor(tokens)).logits
    torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(tokens[0, 1:])).backward()
    expected = {name: weight.grad.numpy() for name, weight in reference.named_parameters() if weight.grad is not None}

    @nnx.jit
    def gradient(model):
        def loss(model):
            log_p = jax.nn.log_softmax(model(tokens, count_up(tokens), jnp.ones_like(tokens))[0, :-1])
            return -jnp.take_along_axis(log_p, tokens[0, 1:, None], axis=-1).mean()

        return nnx.grad(loss)(model)

    actual = {}
    for path, leaf in nnx.to_flat_state(gradient(model)):
        names = [tensor.name for tensor in by_path(model.variant)[path]]
        actual |= zip(names, np.asarray(leaf[...]) if path[0] == "layers" else [np.asarray(leaf[...])], strict=True)
    # layer_scalar is a buffer in transformers, so it has no gradient there.
    assert set(expected) == {name for name in actual if "layer_scalar" not in name}
    for name, gradients in expected.items():
        ours = actual[name] if gradients.ndim == 1 or "embed" in name else np.swapaxes(actual[name], -1, -2)
        # Measured: at most 1e-5.
        assert np.linalg.norm(ours - gradients) < 1e-4 * np.linalg.norm(gradients), name
