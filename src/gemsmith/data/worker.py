"""What a process does that renders rows for another, which asks over stdin and is answered over stdout.

It reads one Opening, then requests until there are no more, each in pickle: a list of documents is answered by its
Packed rows, Prompts by their ids, and either by the error that is the user's to read.
"""

import gc
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gemsmith.data.chat_template import ChatTemplateSource
from gemsmith.data.documents import Document
from gemsmith.data.tokenize import Renderer, check_prompts, open_renderer, render_documents
from gemsmith.errors import GemsmithError
from gemsmith.images.check import ImageInfo
from gemsmith.system.workers import Limits, answer_requests


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a worker renders with: the folder of the tokenizer, the chat template, and what that may use."""

    folder: Path
    template: ChatTemplateSource
    limits: Limits


class Packed(NamedTuple):
    """Rendered documents end to end: a pickle of many small arrays takes as long as making them."""

    ids: np.ndarray
    trained: np.ndarray
    lengths: list[int]
    origins: list[str]
    images: list[tuple[ImageInfo, ...]]


class Prompts(NamedTuple):
    """Documents, each with how many of its first messages make a prompt, to be looked through for control tokens."""

    rows: tuple[tuple[Document, int], ...]


def main() -> None:
    """Answers until stdin ends, or whoever asked is gone."""
    # What is imported stays, and rows are many objects: few of either are garbage in a cycle.
    gc.freeze()
    gc.set_threshold(20_000)
    opening = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own process

    @cache
    def renderer() -> Renderer:
        return open_renderer(opening.folder, opening.template, limits=opening.limits)

    answer_requests(lambda request: _answer(renderer(), request), errors=(GemsmithError,))


def _answer(renderer: Renderer, request: Sequence[Document] | Prompts) -> Packed | list[np.ndarray]:
    if isinstance(request, Prompts):
        return check_prompts(renderer, request.rows)
    rendered = render_documents(renderer, request)
    ids, trained = (np.concatenate([getattr(document, name) for document in rendered]) for name in ("ids", "trained"))
    lengths, origins = [len(document.ids) for document in rendered], [document.origin for document in rendered]
    return Packed(ids, trained, lengths, origins, [document.images for document in rendered])
