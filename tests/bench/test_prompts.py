import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gemsmith.bench.requests import POOL, make_prompts, plain_tokens
from gemsmith.errors import CheckpointError


@pytest.mark.parametrize("tokens", [1, 16, 511, 2000])
def test_prompts_are_as_long_as_asked_and_never_longer(tokens: int, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("tiny-31b")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lengths = [len(tokenizer.encode(prompt).ids) for prompt in make_prompts(folder, tokens=tokens, prompts=8, seed=1)]
    assert max(lengths) <= tokens and min(lengths) >= tokens - 1


def test_prompts_follow_from_the_seed_and_differ_from_each_other(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("tiny-31b")
    one = make_prompts(folder, tokens=32, prompts=8, seed=1)
    assert one == make_prompts(folder, tokens=32, prompts=8, seed=1)
    assert len({*one, *make_prompts(folder, tokens=32, prompts=8, seed=2)}) == 16


def test_no_prompt_can_spell_a_special_token(tiny_checkpoint: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint("tiny-31b") / "tokenizer.json"))
    assert "<" in tokenizer.get_vocab()
    pool = plain_tokens(tokenizer, random.Random(0))
    assert 100 < len(pool) <= POOL and not any("<" in text for text in pool)
    assert all(text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text for text in pool)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        make_prompts(tmp_path, tokens=8, prompts=1, seed=0)
