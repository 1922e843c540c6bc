"""Answers as they come, in files that a second start resumes from: a line each, under a digest of what made it."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemsmith.data.chat_template import find_template
from gemsmith.runs.records import ServerFacts
from gemsmith.runs.run import Run
from gemsmith.serve.client.chat import Reply
from gemsmith.serve.settings import find_vllm
from gemsmith.serve.stage import takes_images
from gemsmith.system.files import atomic_write, sha256_file, sha256_json
from gemsmith.tasks.messages import Message, plain_messages

ANSWERS = "eval_answers.jsonl"
DONE = "eval_answered.jsonl"
"""What ANSWERS is called once the record is written: tasks that are added later do not ask again for the others'."""
AGAIN = "eval_answers_again.jsonl"  # what takes the place of both once an evaluation that is done again is complete
# Beside the weights, these make a request's tokens and how the next is chosen.
_READ_BY_VLLM = (".json", ".jinja", ".model")


class AnswerCache:
    """What some files hold; more is written to the last of them. A line that cannot be read is left out."""

    def __init__(self, *files: Path) -> None:
        self.files = files

    def replies(self) -> dict[str, Reply]:
        """Digest -> answer."""
        kept = {}
        for line in self._lines():
            match line:
                case {"digest": str(digest), "text": str(text), "cut": bool(cut)}:
                    tokens = line.get("tokens")
                    kept[digest] = Reply(text=text, cut=cut, tokens=tokens if isinstance(tokens, int) else None)
        return kept

    def count_retries(self, digests: Collection[str]) -> dict[str, int]:
        """Reason -> requests for these answers that were sent again."""
        found = Counter[str]()
        for line in self._lines():
            match line:
                case {"digest": str(digest), "retried": str(reason)} if digest in digests:
                    found[reason] += 1
        return dict(sorted(found.items()))

    def server(self, digest: str) -> ServerFacts | None:
        """What the last server said of itself that answered for the model of the digest."""
        found = None
        for line in self._lines():
            if line.get("digest") == digest and "server" in line:
                with contextlib.suppress(ValueError):
                    found = ServerFacts.model_validate(line["server"])
        return found

    def add(self, digest: str, **said: Any) -> None:
        """Keeps the fields of a Reply, a reason as `retried`, or what a server said of itself as `server`."""
        with self.files[-1].open("ab+") as stream:
            if stream.tell():  # a line that a killed process was at is ended first
                stream.seek(-1, os.SEEK_END)
                if stream.read() != b"\n":
                    stream.write(b"\n")
            stream.write(json.dumps({"digest": digest, **said}).encode() + b"\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            for line in file.read_bytes().splitlines() if file.exists() else ():
                with contextlib.suppress(ValueError, RecursionError):
                    if isinstance(found := json.loads(line), dict):
                        yield found


def open_cache(run: Run, *, force: bool) -> AnswerCache:
    """The answers of the run's earlier starts; `force`: of an evaluation that is done again."""
    return AnswerCache(*(run.logs / name for name in ((AGAIN,) if force else (DONE, ANSWERS))))


def keep_answers(run: Run, *, force: bool) -> None:
    """Puts the answers of this record with those of the tasks that were there before, or in their place."""
    files = open_cache(run, force=force).files
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.exists()]
    with atomic_write(run.logs / DONE) as stream:
        stream.writelines(text if text.endswith("\n") else f"{text}\n" for text in texts)
    for name in (ANSWERS, AGAIN):
        (run.logs / name).unlink(missing_ok=True)


def digest_model(run: Run, folder: Path, weights_sha256: str, max_tokens: int) -> str:
    """SHA-256 of all that makes a model's answers but the question: weights, template, tokenizer, vLLM, settings."""
    recipe, engine = run.recipe, find_vllm(run.recipe.serve.python)
    return sha256_json(
        {
            "weights": weights_sha256,
            "files": {file.name: sha256_file(file) for file in folder.iterdir() if file.suffix in _READ_BY_VLLM},
            "template": find_template(folder, recipe.data).sha256,
            "vllm": f"{engine.package} {engine.version}",
            "max_tokens": max_tokens,
            "dtype": recipe.serve.dtype,
            "max_model_len": recipe.serve.max_model_len,
            "arguments": recipe.serve.arguments,
            "seed": recipe.seed,
        }
        | ({"served_as": "adapter"} if recipe.serve.weights == "adapter" else {})
        | ({"image_tokens": recipe.data.image_tokens} if takes_images(run) else {})
        | ({"thinking": True} if recipe.data.thinking else {})
        | ({"kv_cache_dtype": recipe.serve.kv_cache_dtype} if recipe.serve.kv_cache_dtype != "auto" else {})
    )


def digest_question(
    model: str,
    messages: Sequence[Message],
    *,
    drawn: Mapping[str, float] | None = None,
    choices: Sequence[str] = (),
    images: Sequence[str] = (),
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """SHA-256 that an answer of the model of that digest is kept under.

    `drawn`: how, with the sample's own seed; `choices`: whose likelihoods are the answer; `images`: their SHA-256.
    """
    how = [*([] if drawn is None else [dict(drawn)]), *([list(choices)] if choices else [])]
    how += [{"images": list(images)}] if images else []
    how += [{"tools": list(tools)}] if tools else []
    return sha256_json([model, *plain_messages(messages), *how])
