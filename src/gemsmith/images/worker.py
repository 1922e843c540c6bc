"""What a process does that decodes pictures for another, which asks over stdin and is answered over stdout.

Each request is a Check or a Cut, in pickle; it is answered by what comes of it, or by the error that it raised.
"""

from typing import NamedTuple

import numpy as np

from gemsmith.errors import GemsmithError
from gemsmith.images.check import ImageInfo, check_picture, cut_picture
from gemsmith.images.decode import BadPicture
from gemsmith.images.patches import Patching
from gemsmith.system.workers import answer_requests


class Check(NamedTuple):
    """A picture to be looked at, by its path or its bytes."""

    source: str | bytes
    patching: Patching


class Cut(NamedTuple):
    """A picture to be cut into patches."""

    picture: ImageInfo
    patching: Patching


def main() -> None:
    """Answers until stdin ends, or whoever asked is gone."""
    answer_requests(answer, errors=(GemsmithError, BadPicture))


def answer(request: Check | Cut) -> ImageInfo | np.ndarray | Exception:
    """What comes of a request."""
    if isinstance(request, Check):
        return check_picture(*request)
    return cut_picture(*request)
