"""Answers as they come, in a file that a second start goes on from: a line each, under a digest of what made it."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gemsmith.data.chat_template import find_template
from gemsmith.runs.records import ServerFacts
from gemsmith.runs.run import Run
from gemsmith.serve.client.chat import Reply
from gemsmith.serve.settings import find_vllm
from gemsmith.serve.stage import takes_images
from gemsmith.system.files import sha256_file, sha256_json
from gemsmith.tasks.messages import Message, plain_messages

# Beside the weights, these make a request's tokens and how the next is chosen.
_READ_BY_VLLM = (".json", ".jinja", ".model")


def digest_model(run: Run, folder: Path, weights_sha256: str, *, max_tokens: int | None = None) -> str:
    """SHA-256 of all that makes a model's answers but the question: weights, template, tokenizer, vLLM, settings.

    `max_tokens`: of the task; default: eval.max_tokens.
    """
    recipe, engine = run.recipe, find_vllm(run.recipe.serve.python)
    return _sha256(
        {
            "weights": weights_sha256,
            "files": {
                file.name: sha256_file(file) for file in sorted(folder.iterdir()) if file.suffix in _READ_BY_VLLM
            },
            "template": find_template(folder, recipe.data.template).sha256,
            "vllm": f"{engine.package} {engine.version}",
            "max_tokens": max_tokens or recipe.eval.max_tokens,
            "dtype": recipe.serve.dtype,
            "max_model_len": recipe.serve.max_model_len,
            "arguments": recipe.serve.arguments,
            "seed": recipe.seed,
        }
        | ({"served_as": "adapter"} if recipe.serve.weights == "adapter" else {})
        | ({"image_tokens": recipe.data.image_tokens} if takes_images(run) else {})
        | ({"kv_cache_dtype": recipe.serve.kv_cache_dtype} if recipe.serve.kv_cache_dtype != "auto" else {})
    )


def digest_question(
    model: str,
    messages: Sequence[Message],
    *,
    drawn: Mapping[str, float] | None = None,
    choices: Sequence[str] = (),
    images: Sequence[str] = (),
) -> str:
    """SHA-256 that an answer of the model of that digest is kept under.

    `drawn`: how, with the sample's own seed; `choices`: whose likelihoods are the answer; `images`: their SHA-256.
    """
    how = [*([] if drawn is None else [dict(drawn)]), *([list(choices)] if choices else [])]
    how += [{"images": list(images)}] if images else []
    return _sha256([model, *plain_messages(messages), *how])


def read_cache(file: Path) -> dict[str, Reply]:
    """Digest -> answer. A line that cannot be read, such as one that a killed process was at, is left out."""
    kept = {}
    for line in _lines(file):
        match line:
            case {"digest": str(digest), "text": str(text), "cut": bool(cut)}:
                tokens = line.get("tokens")
                kept[digest] = Reply(text=text, cut=cut, tokens=tokens if isinstance(tokens, int) else None)
    return kept


def read_retries(file: Path) -> list[tuple[str, str]]:
    """For each request that was tried again the digest of its answer and the reason."""
    found = []
    for line in _lines(file):
        match line:
            case {"digest": str(digest), "retried": str(reason)}:
                found.append((digest, reason))
    return found


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
    _write(stream, {"digest": digest, "text": reply.text, "cut": reply.cut, "tokens": reply.tokens})


def log_retry(stream: IO[bytes], digest: str, reason: str) -> None:
    _write(stream, {"digest": digest, "retried": reason})


def keep_server(stream: IO[bytes], digest: str, facts: ServerFacts) -> None:
    _write(stream, {"digest": digest, "server": facts.model_dump(mode="json")})


def read_server(file: Path, digest: str) -> ServerFacts | None:
    """What the last server said of itself that answered for the model of the digest."""
    found = None
    for line in _lines(file):
        if line.get("digest") == digest and "server" in line:
            with contextlib.suppress(ValueError):
                found = ServerFacts.model_validate(line["server"])
    return found


def _write(stream: IO[bytes], line: Mapping[str, Any]) -> None:
    stream.write(json.dumps(line).encode() + b"\n")
    stream.flush()


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                yield found


def _sha256(inputs_sha256: object) -> str:
    return sha256_json(inputs_sha256)
