"""Random prompts of an exact number of tokens.

vLLM's own `random` prompts drift: they decode random ids, and where a token is half a character, what comes back is
longer (128 asked, 192 sent with a tokenizer of 1,024 tokens; requests over max_model_len then fail). These are made of
tokens that survive the round trip.
"""

import random
from pathlib import Path
from typing import TYPE_CHECKING

from gemsmith.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

POOL = 1000
TRIES = 20


def make_prompts(folder: Path, *, tokens: int, prompts: int, seed: int) -> list[str]:
    """Random prompts that the checkpoint folder's tokenizer turns into `tokens` ids each, BOS counted.

    Where neighbours merge so that the number cannot be met, a prompt is a few tokens short, never longer.
    """
    tokenizer = load_tokenizer(folder)
    source = random.Random(seed)
    pool = _plain_tokens(tokenizer, source)
    return [_make_prompt(tokenizer, pool, tokens, source) for _ in range(prompts)]


def load_tokenizer(folder: Path) -> "Tokenizer":
    """The folder's tokenizer.json."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"checkpoint {folder}: has no tokenizer.json; copy it from where the weights came from")
    return Tokenizer.from_file(str(file))


def count_tokens(tokenizer: "Tokenizer", text: str) -> int:
    return len(tokenizer.encode(text).ids)


def _plain_tokens(tokenizer: "Tokenizer", source: random.Random) -> list[str]:
    """Texts that are one token each, also behind a word.

    No special tokens, no signs that begin one, no halves of characters.
    """
    bare = count_tokens(tokenizer, "a")
    added = tokenizer.get_added_tokens_decoder()
    # Neighbours could otherwise spell a special token between them, such as `<` and `eos>`.
    begins = {token.content[0] for token in added.values() if token.special}
    ids = list(range(tokenizer.get_vocab_size()))
    source.shuffle(ids)
    pool: list[str] = []
    for number in ids:
        text = tokenizer.decode([number])
        if number in added or begins & set(text):
            continue
        if text and text.isprintable() and "�" not in text and count_tokens(tokenizer, f"a{text}") in (bare, bare + 1):
            pool.append(text)
        if len(pool) == POOL:
            break
    if not pool:
        raise CheckpointError(
            "tokenizer.json: has no token that decodes to printable text, so bench cannot make prompts; is it the "
            "model's own?"
        )
    return pool


def _make_prompt(tokenizer: "Tokenizer", pool: list[str], tokens: int, source: random.Random) -> str:
    pieces = source.choices(pool, k=tokens)
    best = ""
    for _ in range(TRIES):
        ids = tokenizer.encode("".join(pieces)).ids
        excess = len(ids) - tokens
        if excess <= 0 and len("".join(pieces)) > len(best):
            best = "".join(pieces)
        if excess == 0:
            return best
        if excess > 0:
            pieces = pieces[: -min(excess, len(pieces))]
        else:
            pieces += source.choices(pool, k=-excess)
    return best
