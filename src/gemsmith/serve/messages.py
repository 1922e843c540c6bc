"""A conversation as an OpenAI API takes it: pictures are data: URLs in their places."""

from collections.abc import Iterator, Sequence
from typing import Any

from gemsmith.messages import ImagePart, Message, images_of, text_of
from gemsmith.pictures.check import Picture
from gemsmith.pictures.patches import Patching
from gemsmith.pictures.sent import picture_url


def api_messages(
    messages: Sequence[Message], pictures: Sequence[Picture] = (), patching: Patching | None = None
) -> list[dict[str, Any]]:
    """The messages of a request; content that is text alone is a string.

    `pictures` are what was found of theirs, in order; where they are given, bytes that have changed since are a
    DataError. `patching`: see picture_url.
    """
    hashes: Iterator[str | None] = iter([picture.sha256 for picture in pictures])
    found: list[dict[str, Any]] = []
    for message in messages:
        content: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, ImagePart):
                content.append(image_content(picture_url(part.path or part.data, patching, sha256=next(hashes, None))))
            else:
                content.append({"type": "text", "text": part.text})
        found.append({"role": message.role, "content": content if images_of([message]) else text_of(message)})
    return found


def image_content(url: str) -> dict[str, Any]:
    """The part of a message's content that is a picture."""
    return {"type": "image_url", "image_url": {"url": url}}
