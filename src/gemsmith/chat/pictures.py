"""Pictures in a conversation: files as what a server is sent, rows with theirs, and contents as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.errors import DataError
from gemsmith.pictures.patches import Patching
from gemsmith.pictures.sent import picture_url
from gemsmith.serve.messages import api_messages, image_content
from gemsmith.tasks import Question

Content = str | list[dict[str, Any]]
Turns = list[dict[str, Any]]
PLACE = "[picture] "


@dataclass(frozen=True, kw_only=True)
class Sight:
    """Whether the server takes pictures, and how its model cuts them up, where that is known."""

    takes_pictures: bool = True
    patching: Patching | None = None

    def look(self, file: str) -> str:
        """The data: URL of the file's picture. Raises DataError where it is none, or the server takes text alone."""
        if not self.takes_pictures:
            raise DataError(
                "the server takes text alone; start the chat with --set serve.pictures=true, of a model that takes "
                "pictures"
            )
        return picture_url(file, self.patching)

    def turns(self, row: Question) -> Turns:
        """The messages of a held-out row. Raises DataError where a picture of it has changed since it was read."""
        return api_messages(row.messages, row.pictures, self.patching)


def make_content(text: str, urls: Sequence[str]) -> Content:
    """What a user's turn holds: the pictures, then the text.

    >>> make_content("hi", [])
    'hi'
    """
    return [*map(image_content, urls), {"type": "text", "text": text}] if urls else text


def text_in(content: Content) -> str:
    """All its text."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def urls_in(content: Content) -> list[str]:
    """The data: URLs of its pictures, in order."""
    return [part["image_url"]["url"] for part in content if "image_url" in part] if isinstance(content, list) else []


def described(content: Content) -> str:
    """Its text for a terminal, with a picture as its place.

    >>> described(make_content("What is it?", ["data:image/png;base64,"]))
    '[picture] What is it?'
    """
    if isinstance(content, str):
        return content
    return "".join(PLACE if "image_url" in part else part["text"] for part in content)
