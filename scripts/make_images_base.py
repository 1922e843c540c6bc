"""Makes recipes/demo_images_base, the tiny Gemma 4 that sees of the images' demo: seeded, on a CPU, in minutes.

    python scripts/make_images_base.py /usr/share/datasets/fashion-mnist

It is of the E2B's kind, whose images are causal, since vLLM on a CPU has no other. It learns to name five of the ten
kinds of clothing, and to sketch any image in digits, so that its tower has seen all ten. Of the other five it never
sees a name. Its images are Fashion-MNIST's training images from number 20,000 on; the demo trains on the first.
"""

import argparse
import math
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from gemsmith.arch import VisionTower, find_variant, text_tensors, vision_tensors
from gemsmith.data.prepare.fashion_mnist import CLASSES, read_images
from gemsmith.images.patches import PatchConfig, make_patches
from make_demo_base import IGNORED, start_lively
from tiny_checkpoints import IMAGE_TOKENS, make_config, make_tokenizer, write_checkpoint

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recipes" / "demo_images_base"
TOWER = VisionTower(
    layers=3, embed_dim=64, ffn=128, heads=4, head_dim=16, clips=True, patch=4, pooling=2, positions=128, soft_tokens=70
)
VARIANT = replace(find_variant("tiny-e2b"), embed_dim=128, ffn=256, vision=TOWER)
PATCHING = PatchConfig(budget=TOWER.soft_tokens, patch=TOWER.patch, pooling=TOWER.pooling)
IMAGE, BEGIN, END = (IMAGE_TOKENS[key][0] for key in ("image_token", "boi_token", "eoi_token"))
KNOWN = ("t-shirt", "trouser", "coat", "sandal", "bag")
FIRST = 20_000
BOUND = 20.0
"""What the tower's linear layers are clipped to, as the E2B's are: more than they come to here."""
NAME = f"Which of these is it: {', '.join(sorted(name.replace('_', ' ') for name in CLASSES))}?"
SKETCH = "Sketch it."


class Row(NamedTuple):
    """An image (28, 28) of uint8, what is asked about it, and the answer."""

    image: np.ndarray
    prompt: str
    answer: str


class Batch(NamedTuple):
    """Tokens and targets (B, L), patches (B, P, C) and their positions (B, P, 2)."""

    tokens: torch.Tensor
    targets: torch.Tensor
    patches: torch.Tensor
    positions: torch.Tensor


def generate_rows(folder: Path, seed: int) -> Iterator[Row]:
    images, labels = (values[FIRST:] for values in read_images(folder, "train"))
    known = np.flatnonzero(np.isin(labels, [CLASSES.index(name) for name in KNOWN]))
    source = random.Random(seed)
    while True:
        if source.random() < 0.6:
            number = int(source.choice(known))
            yield Row(images[number], NAME, CLASSES[labels[number]])
        else:
            image = images[source.randrange(len(images))]
            yield Row(image, SKETCH, sketch(image))


def sketch(image: np.ndarray) -> str:
    """Four rows of four digits: how bright each cell of 7 by 7 pixels is, from 0 to 9."""
    cells = image.reshape(4, 7, 4, 7).mean(axis=(1, 3)) * (10 / 256)
    return "\n".join("".join(map(str, row)) for row in cells.astype(int))


def batches(tokenizer: Tokenizer, rows: Iterator[Row], count: int) -> Iterator[Batch]:
    heads = {prompt: prompt_ids(tokenizer, prompt) for prompt in (NAME, SKETCH)}
    while True:
        yield make_batch(tokenizer, [next(rows) for _ in range(count)], heads)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    before, after = (
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in ("<bos><|turn>user\n", f"{prompt}<turn|>\n<|turn>model\n")
    )
    square = math.isqrt(TOWER.soft_tokens) ** 2
    return [*before, BEGIN, *[IMAGE] * square, END, *after]


def make_batch(tokenizer: Tokenizer, rows: Sequence[Row], heads: Mapping[str, Sequence[int]]) -> Batch:
    encoded = [
        (heads[row.prompt], tokenizer.encode(f"{row.answer}<turn|>", add_special_tokens=False).ids) for row in rows
    ]
    length = max(len(head) + len(tail) for head, tail in encoded)
    tokens, targets = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), IGNORED)
    for row, (head, tail) in enumerate(encoded):
        tokens[row, : len(head) + len(tail)] = torch.tensor([*head, *tail])
        targets[row, len(head) : len(head) + len(tail)] = torch.tensor(tail)
    cut = [make_patches(Image.fromarray(row.image).convert("RGB"), PATCHING) for row in rows]
    patches, positions = (np.stack([getattr(one, name) for one in cut]) for name in ("values", "positions"))
    return Batch(tokens, targets, torch.tensor(patches), torch.tensor(positions).long())


def make_model() -> Gemma4ForConditionalGeneration:
    config = make_config(VARIANT, "float32")
    model = Gemma4ForConditionalGeneration(Gemma4Config(**config)).float()
    start_lively(model, VARIANT.embed_dim)
    torch.nn.init.normal_(model.model.vision_tower.patch_embedder.position_embedding_table, std=0.3)
    for name, bound in model.named_buffers():
        if name.endswith(("put_min", "put_max")):
            bound.fill_(-BOUND if name.endswith("min") else BOUND)
    return model


def pretrain(
    folder: Path, tokenizer: Tokenizer, *, steps: int, rows: int, learning_rate: float, seed: int
) -> torch.nn.Module:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step, batch in zip(range(steps), batches(tokenizer, generate_rows(folder, seed), rows), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        logits = model(
            input_ids=batch.tokens,
            pixel_values=batch.patches,
            image_position_ids=batch.positions,
            mm_token_type_ids=(batch.tokens == IMAGE).long(),
            use_cache=False,
        ).logits[:, :-1]
        targets = batch.targets[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step} loss {loss.item():.4f}", file=sys.stderr, flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fashion_mnist", type=Path, help="the folder with its four files")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    make_tokenizer(arguments.folder, vision=True)
    model = pretrain(
        arguments.fashion_mnist,
        Tokenizer.from_file(str(arguments.folder / "tokenizer.json")),
        steps=arguments.steps,
        rows=arguments.rows,
        learning_rate=arguments.learning_rate,
        seed=0,
    )
    state = model.state_dict()
    names = [tensor.name for tensor in (*text_tensors(VARIANT), *vision_tensors(VARIANT))]
    write_checkpoint(VARIANT, {name: state[name].detach().numpy() for name in names}, arguments.folder)


if __name__ == "__main__":
    main()
