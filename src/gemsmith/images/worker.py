"""What a process does that decodes images for another, which asks over stdin and is answered over stdout.

Each request is a Check or a Cut, in pickle; it is answered by what comes of it, or by the error that it raised.
"""

from typing import NamedTuple

import numpy as np

from gemsmith.errors import GemsmithError
from gemsmith.images.check import ImageInfo, patchify, validate_image
from gemsmith.images.decode import InvalidImageError
from gemsmith.images.patches import PatchConfig
from gemsmith.system.workers import answer_requests


class Check(NamedTuple):
    """A image to be looked at, by its path or its bytes."""

    source: str | bytes
    patching: PatchConfig


class Cut(NamedTuple):
    """A image to be cut into patches."""

    image: ImageInfo
    patching: PatchConfig


def main() -> None:
    """Answers until stdin ends, or whoever asked is gone."""
    answer_requests(answer, errors=(GemsmithError, InvalidImageError))


def answer(request: Check | Cut) -> ImageInfo | np.ndarray | Exception:
    """What comes of a request."""
    if isinstance(request, Check):
        return validate_image(*request)
    return patchify(*request)
