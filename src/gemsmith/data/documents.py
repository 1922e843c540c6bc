"""A checked row, apart from its readers: a process that renders rows starts in a third of the time without these."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemsmith.images.check import ImageInfo
from gemsmith.tasks.messages import Message

FORMS = {"messages": ("messages",), "prompt-response": ("prompt", "response")}
"""The columns of each form that rows may have."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One checked row. `origin` says where it stands, for messages to the user: `rows.jsonl line 12`."""

    messages: tuple[Message, ...]
    origin: str
    form: str = "messages"
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row, where they were asked for."""
    images: tuple[ImageInfo, ...] = ()
    """What was found of its images, in the order of its image parts, once they have been looked at."""

    def name(self, index: int) -> str:
        """What the row calls its message of this index: messages[1], or response."""
        return f"messages[{index}]" if self.form == "messages" else FORMS[self.form][index]
