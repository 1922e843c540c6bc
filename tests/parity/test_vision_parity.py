"""Gemma 4 with images here and in transformers, from the same weights and the same patches."""

import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoModelForImageTextToText

from gemsmith.arch import VisionTower, find_variant, text_tensors, vision_tensors
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.data.batches import join, room_for
from gemsmith.images.patches import Patches
from gemsmith.models import abstract_model, load_model
from gemsmith.train.jax.images import batch_images, bucket_shape
from tiny_checkpoints import IMAGE_TOKENS, make_tokenizer, with_vision, write_checkpoint

TINY = ("tiny-31b", *(pytest.param(f"tiny-{name}", marks=pytest.mark.slow) for name in ("e2b", "26b-a4b", "12b")))
BOI, IMAGE, EOI = (IMAGE_TOKENS[name][0] for name in ("boi_token", "image_token", "eoi_token"))


class Pair:
    """The same checkpoint in both libraries, in which no norm, no layer scalar and no bound is 1."""

    def __init__(self, name, folder):
        self.variant, self.folder = with_vision(find_variant(name)), folder
        self.vision = self.variant.vision
        random = np.random.default_rng(7)
        tensors = (*text_tensors(self.variant), *vision_tensors(self.variant))
        write_checkpoint(
            self.variant, {tensor.name: make_weight(tensor, random) for tensor in tensors}, folder, dtype="float32"
        )
        make_tokenizer(folder, vision=True)
        self.reference, self.model = self.load_reference(torch.float32), self.load("float32")

    def load(self, dtype):
        checkpoint = open_checkpoint(str(self.folder))
        return load_model(checkpoint, abstract_model(checkpoint.variant, dtype=dtype, vision=True))

    def load_reference(self, dtype):
        return AutoModelForImageTextToText.from_pretrained(self.folder, attn_implementation="eager", dtype=dtype).eval()

    def make_images(self, sizes):
        """One image of columns by rows soft tokens for each size."""
        random, side = np.random.default_rng(3), self.vision.pooling if isinstance(self.vision, VisionTower) else 1
        images = []
        for columns, rows in sizes:
            grid = np.stack(np.meshgrid(np.arange(columns * side), np.arange(rows * side)), axis=-1).reshape(-1, 2)
            patches = random.random((len(grid), self.vision.patch_dim)).astype(np.float32)
            images.append(Patches(values=patches, positions=grid, soft_tokens=columns * rows))
        return images

    def reference_images(self, sizes):
        """The same as transformers takes them, padded to the largest."""
        images = self.make_images(sizes)
        most = max(len(image.values) for image in images)
        pad = [(0, most - len(image.values)) for image in images]
        each = zip(images, pad, strict=True)
        return {
            "pixel_values": torch.tensor(np.stack([np.pad(one.values, (end, (0, 0))) for one, end in each])),
            "image_position_ids": torch.tensor(
                np.stack(
                    [
                        np.pad(one.positions, (end, (0, 0)), constant_values=-1)
                        for one, end in zip(images, pad, strict=True)
                    ]
                )
            ),
        }

    def reference_features(self, sizes, reference=None):
        """(soft tokens of all images, E)"""
        images = self.reference_images(sizes)
        with torch.no_grad():
            found = (reference or self.reference).model.get_image_features(**images, return_dict=True)
        return torch.cat(found.pooler_output).float().numpy()

    def features(self, sizes, model=None):
        """The same, by our model."""
        (_, _, _, images), counts = (
            self.inputs([(np.full(sum(c * r for c, r in sizes), IMAGE), sizes)]),
            [c * r for c, r in sizes],
        )
        embeddings = np.asarray(embed(model or self.model, images).embeddings, np.float32)
        by_image = embeddings.reshape(len(counts), -1, self.variant.embed_dim)
        return np.concatenate([rows[:count] for rows, count in zip(by_image, counts, strict=True)])

    def reference_logits(self, document, reference=None):
        """(L, V) of one document, alone."""
        tokens, sizes = document
        rows = {"input_ids": tokens[None], "mm_token_type_ids": (tokens == IMAGE)[None].astype(np.int64)}
        inputs = {name: torch.tensor(value) for name, value in rows.items()}
        inputs |= self.reference_images(sizes) if sizes else {}
        if self.variant.model_type == "gemma4_unified":
            inputs["attention_mask"] = self.generation_masks(inputs["mm_token_type_ids"])
        return (reference or self.reference)(**inputs, use_cache=False).logits[0]

    def generation_masks(self, types):
        """Those with which the 12B's class generates, as vLLM does, and the other classes' forward passes mask.

        Its own forward pass still lets images see each other in the global layers, and beyond the window, as all of
        transformers' did until 5.12.
        """
        embeds = torch.zeros(*types.shape, self.variant.embed_dim)
        rest = {"attention_mask": None, "past_key_values": None, "position_ids": None, "mm_token_type_ids": types}
        return self.reference.create_masks_for_generate(self.reference.config, embeds, **rest)

    def inputs(self, *rows, length=None):
        """What our model takes for rows of documents, packed: tokens, positions, segments and images, padded."""
        length = length or sum(len(tokens) for tokens, _ in rows[0])
        arrays = np.zeros((3, len(rows), length), np.int32)
        for row, documents in enumerate(rows):
            columns = [(t, np.arange(len(t)), np.full(len(t), n)) for n, (t, _) in enumerate(documents, start=1)]
            packed = np.concatenate(columns, axis=1)
            arrays[:, row, : packed.shape[1]] = packed
        sizes = [[size for _, sizes in documents for size in sizes] for documents in rows]
        images = [[one for _, sizes in documents for one in self.make_images(sizes)] for documents in rows]
        room = join([room_for([columns * high for columns, high in each]) for each in sizes])
        shape = bucket_shape(self.vision, room)
        return *arrays, batch_images(arrays[0], images, image_token=IMAGE, shape=shape)


@nnx.jit
def embed(model, images):
    return model.embed_images(images, length=128)


@nnx.jit
def run(model, tokens, positions, segments, images):
    return model(tokens, positions, segments, model.embed_images(images, length=tokens.shape[1]))


def make_document(seed, *parts):
    """Tokens (L,) and images' sizes of parts: so many random tokens, or an image of columns by rows soft tokens."""
    random, tokens, sizes = np.random.default_rng(seed), [2], []
    for part in parts:
        if isinstance(part, int):
            tokens += random.integers(108, 1024, part).tolist()
        else:
            tokens += [BOI, *[IMAGE] * (part[0] * part[1]), EOI]
            sizes.append(part)
    return np.array(tokens), sizes


@pytest.fixture(scope="module", params=TINY)
def pair(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp("parity") / request.param)


def make_weight(tensor, random):
    noise = random.standard_normal(tensor.shape).astype(np.float32)
    if tensor.role == "vision_bound":  # a tenth of what goes in is beyond
        return np.asarray((-1 if tensor.name.endswith("_min") else 1) * (1.6 + 0.1 * abs(noise)), np.float32)
    if tensor.name.endswith("bias") or tensor.role == "vision_position":
        return np.float32(0.3) * noise
    if len(tensor.shape) > 1:
        return noise / np.float32(np.sqrt(tensor.shape[-1]))
    # Queries of norm 1 make attention so sharp that transformers' own fp32 is 4e-4 from its fp64; at a quarter it is
    # 1e-5.
    return (0.25 if "q_norm" in tensor.name else 0.9) + 0.1 * noise


# Wider than high, one row of soft tokens, one soft token, and one that needs no padding.
SIZES = ((6, 4), (1, 7), (1, 1), (8, 6))


def test_features_agree_from_equal_patches(pair):
    expected, actual = pair.reference_features(SIZES), pair.features(SIZES)
    # Measured: 1.4e-6 to 1.9e-6.
    assert np.abs(actual - expected).max() < 1e-5
    assert np.abs(expected).max() > 1


# The window is 64. One image within it and one that is longer; two, with nothing but their border tokens between.
LONG = make_document(1, 5, (4, 3), 9, (10, 8), 12)
ADJACENT = make_document(2, (7, 4), (6, 6), 30)
TEXT = make_document(3, 40)


def test_logits_agree_with_images_longer_than_the_window_and_adjacent_and_packed(pair):
    """First row: two documents; second row: text alone, and an image at its end. Each against itself alone."""
    rows = ((ADJACENT, LONG), (TEXT, make_document(4, 20, (5, 5))))
    inputs = pair.inputs(*rows, length=256)
    actual = np.asarray(run(pair.model, *inputs))
    assert np.isfinite(actual).all()
    for row, documents in enumerate(rows):
        begin = 0
        for document in documents:
            with torch.no_grad():
                expected = pair.reference_logits(document).numpy()
            end = begin + len(expected)
            # Measured: 4e-6 to 8e-6.
            assert np.abs(actual[row, begin:end] - expected).max() < 1e-4
            begin = end


@pytest.mark.slow
def test_bfloat16_errs_no_more_than_transformers_bfloat16(pair):
    """Both against transformers in float32."""
    expected = pair.reference_features(SIZES)
    theirs = pair.reference_features(SIZES, pair.load_reference(torch.bfloat16))
    ours = pair.features(SIZES, pair.load("bfloat16"))
    errors = [np.sqrt(np.mean((actual - expected) ** 2)) for actual in (ours, theirs)]

    assert 0 < errors[0] < errors[1] * 1.1
