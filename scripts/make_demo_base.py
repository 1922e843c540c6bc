"""Makes recipes/demo_base, the tiny Gemma 4 that the demo starts from: seeded, on a CPU, in about half an hour.

    python scripts/make_demo_base.py            recipes/demo_base
    python scripts/make_demo_base.py --tokenizer   scripts/tiny_checkpoints/tokenizer.json, which it needs

LoRA on a random model learns next to nothing, so the base must know something. It learns to repeat words, and to write
C, Python, JSON and port lists for the specifications of gemsmith.tasks.verilog.demo's train split. It never sees a
Verilog module, nor a specification of the held-out split.
"""

import argparse
import itertools
import json
import math
import random
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from gemsmith.arch import find_variant
from gemsmith.arch.tensors import PREFIX
from gemsmith.tasks.verilog.demo import PORTS, WORDS, Spec, describe, expression, generate_rows, make_specs
from tiny_checkpoints import SPECIAL_TOKENS, make_tokenizer, text_config, write_checkpoint

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "scripts" / "tiny_checkpoints" / "tokenizer.json"
FOLDER = ROOT / "recipes" / "demo_base"
VARIANT = find_variant("tiny-31b")
IGNORED = -100
COPY_STEPS = 800
NEWLINE_ID, FIRST_BYTE_ID = 107, 108


def write_c(spec: Spec) -> str:
    arguments = ", ".join(f"u{width} {name}" for name, width in spec.inputs)
    name, width = spec.output
    if spec.form == "register":
        _, reset, value = spec.operands
        return (
            f"void {spec.name}({arguments}, u{width} *{name}) {{\n  if ({reset}) *{name} = 0;\n  else *{name} = "
            f"{value};\n}}"
        )
    return f"u{width} {spec.name}({arguments}) {{\n  return {expression(spec)};\n}}"


def write_python(spec: Spec) -> str:
    names = spec.operands
    value = {"select": "{1} if {0} else {2}", "register": "0 if {1} else {2}"}.get(spec.form, "").format(
        *names
    ) or expression(spec)
    return f"def {spec.name}({', '.join(names)}):\n  {spec.output[0]} = {value}\n  return {spec.output[0]}"


def write_json(spec: Spec) -> str:
    ports = ", ".join(f'"{name}": [{width - 1}:0]' for name, width in (*spec.inputs, spec.output))
    return f'{{"name": "{spec.name}", {ports}}}'


def write_ports(spec: Spec) -> str:
    lines = [("in", *port) for port in spec.inputs] + [("out", *spec.output)]
    return "\n".join(f"{way} {'' if width == 1 else f'[{width - 1}:0] '}{name};" for way, name, width in lines)


TASKS = (
    ("C function", write_c),
    ("Python function", write_python),
    ("JSON header", write_json),
    ("port list", write_ports),
)


def spec_rows(seed: int) -> Iterator[tuple[str, str]]:
    source = random.Random(seed)
    for spec in make_specs("train", seed):
        kind, write = source.choice(TASKS)
        yield f"Write a {kind} {describe(spec)}", write(spec)


def repeat_row(source: random.Random, longest: int) -> tuple[str, str]:
    words = [source.choice(WORDS + PORTS) for _ in range(source.randint(2, longest))]
    if source.random() < 0.7:
        return f"Repeat: {' '.join(words)}", " ".join(words)
    return f"Repeat with commas: {' '.join(words)}", ", ".join(words)


def make_shipped_tokenizer() -> None:
    rows = [
        *itertools.islice(spec_rows(0), 8000),
        *((row["prompt"], row["response"]) for row in generate_rows(4000, "train", 0)),
    ]
    train_tokenizer([f"{prompt}\n{answer}\nuser\nmodel\nsystem\n" for prompt, answer in rows], TOKENIZER)


def train_tokenizer(texts: Iterable[str], file: Path, *, vocabulary: int = 1024) -> None:
    """Writes a tokenizer.json in Gemma's form, its merges learned from the texts: BPE, byte fallback, spaces as ▁."""
    merges_wanted = vocabulary - FIRST_BYTE_ID - 256
    texts = list(texts)
    alphabet = sorted({character for text in texts for character in text.replace(" ", "▁")} - {"\n"})
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    # Words, numbers digit by digit, and single signs: no merge crosses a word's border.
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?[A-Za-z_]+|▁+|[0-9]|[^A-Za-z_0-9▁]"), "isolated")
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=merges_wanted, show_progress=False, initial_alphabet=[], limit_alphabet=1000, min_frequency=2
        ),
    )
    merges = json.loads(learner.to_str())["model"]["merges"]
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    pieces = list(dict.fromkeys(pieces))[:merges_wanted]
    merges = [pair for pair in merges if "".join(pair) in set(pieces)]
    ids = [f"<unused{number}>" for number in range(FIRST_BYTE_ID)]
    for number, token in SPECIAL_TOKENS.items():
        ids[number] = token
    ids[NEWLINE_ID] = "\n"
    ids += [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    ids += [f"<unused{number}>" for number in range(len(ids), vocabulary)]
    model = models.BPE(
        vocab={token: number for number, token in enumerate(ids)},
        merges=[tuple(pair) for pair in merges],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS.values()))
    tokenizer.save(str(file), pretty=False)


def batches(tokenizer: Tokenizer, steps: int, rows: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets (rows, L).

    Copying is learned first, from few words to many: without that, the loss stayed at what the words' frequencies give
    for 900 steps.
    """
    source, specs = random.Random(seed), spec_rows(seed + 1)
    for step in range(steps):
        share, count = (1.0, 3 * rows) if step < COPY_STEPS else (0.2, rows)
        longest = min(14, 3 + step // 100)
        pairs = [repeat_row(source, longest) if source.random() < share else next(specs) for _ in range(count)]
        encoded = []
        for prompt, answer in pairs:
            head = tokenizer.encode(f"<bos><|turn>user\n{prompt}<turn|>\n<|turn>model\n", add_special_tokens=False).ids
            encoded.append((head, tokenizer.encode(f"{answer}<turn|>", add_special_tokens=False).ids))
        length = max(len(head) + len(tail) for head, tail in encoded)
        tokens, targets = torch.zeros(count, length, dtype=torch.long), torch.full((count, length), IGNORED)
        for row, (head, tail) in enumerate(encoded):
            tokens[row, : len(head) + len(tail)] = torch.tensor(head + tail)
            targets[row, len(head) : len(head) + len(tail)] = torch.tensor(tail)
        yield tokens, targets


def start_lively(model: torch.nn.Module, embed_dim: int) -> None:
    """Sets a start in which a token's own embedding is not drowned by what the first layers add to it."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
                weight.fill_(0.3)
            elif weight.ndim == 2:
                weight.normal_(0.0, embed_dim**-0.5 if "embed_tokens" in name else weight.shape[1] ** -0.5)


def pretrain(steps: int, rows: int, learning_rate: float, seed: int) -> Gemma4ForCausalLM:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config = Gemma4TextConfig(**text_config(VARIANT))
    config._attn_implementation = "eager"
    model = Gemma4ForCausalLM(config).float()
    start_lively(model, VARIANT.embed_dim)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step, (tokens, targets) in enumerate(batches(Tokenizer.from_file(str(TOKENIZER)), steps, rows, seed)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        logits = model(tokens, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", file=sys.stderr, flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", action="store_true", help="make the tokenizer instead of the base")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    if arguments.tokenizer:
        make_shipped_tokenizer()
        return
    model = pretrain(arguments.steps, arguments.rows, arguments.learning_rate, seed=0)
    weights = {
        name.replace("model.", PREFIX, 1): value.detach().numpy()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    shutil.rmtree(arguments.folder, ignore_errors=True)
    write_checkpoint(VARIANT, weights, arguments.folder)
    make_tokenizer(arguments.folder)


if __name__ == "__main__":
    main()
