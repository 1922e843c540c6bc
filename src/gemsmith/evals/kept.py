"""Answers as they come, in a file that a second start goes on from: a line each, under a digest of what made it."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from gemsmith.data.template import find_template
from gemsmith.files import sha256_file
from gemsmith.messages import Message, plain_messages
from gemsmith.run import Run
from gemsmith.serve.chat import Reply
from gemsmith.serve.engine import find_engine

# Beside the weights, these make a request's tokens and how the next is chosen.
_READ_BY_VLLM = (".json", ".jinja", ".model")


def digest_model(run: Run, folder: Path, weights_sha256: str) -> str:
    """SHA-256 of all that makes a model's answers but the question: weights, template, tokenizer, vLLM, settings."""
    recipe, engine = run.recipe, find_engine(run.recipe.serve.python)
    return _sha256(
        {
            "weights": weights_sha256,
            "files": {
                file.name: sha256_file(file) for file in sorted(folder.iterdir()) if file.suffix in _READ_BY_VLLM
            },
            "template": find_template(folder, recipe.data.template).sha256,
            "vllm": f"{engine.package} {engine.version}",
            "max_tokens": recipe.eval.max_tokens,
            "dtype": recipe.serve.dtype,
            "max_model_len": recipe.serve.max_model_len,
            "arguments": recipe.serve.arguments,
            "seed": recipe.seed,
        }
    )


def digest_question(model: str, messages: Sequence[Message]) -> str:
    """SHA-256 that an answer of the model of that digest is kept under."""
    return _sha256([model, *plain_messages(messages)])


def read_kept(file: Path) -> dict[str, Reply]:
    """Digest -> answer. A line that cannot be read, such as one that a killed process was at, is left out."""
    kept = {}
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(line):
                case {"digest": str(digest), "text": str(text), "cut": bool(cut)}:
                    kept[digest] = Reply(text=text, cut=cut)
    return kept


@contextlib.contextmanager
def appending(file: Path) -> Iterator[IO[bytes]]:
    """The file, open for more lines; one that a killed process was at is ended first."""
    with file.open("ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read() != b"\n":
                stream.write(b"\n")
        yield stream


def keep(stream: IO[bytes], digest: str, reply: Reply) -> None:
    stream.write(json.dumps({"digest": digest, "text": reply.text, "cut": reply.cut}).encode() + b"\n")
    stream.flush()


def _sha256(made_from: object) -> str:
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
