"""A checked row, apart from its readers: a process that renders rows starts in a third of the time without these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemsmith.images.check import ImageInfo
from gemsmith.tasks.messages import Message


@dataclass(frozen=True, kw_only=True)
class Document:
    """One checked row. `origin` says where it stands, for messages to the user: `rows.jsonl line 12`."""

    messages: tuple[Message, ...]
    origin: str
    names: tuple[str, ...] = ()  # what the row calls its messages: prompt and response. Without any: messages[0], …
    context: int = 0  # how many of the first messages are context alone: no answer among them is trained
    tools: Sequence[Mapping[str, Any]] = ()  # the functions that the model is told it may call
    columns: Mapping[str, Any] = field(default_factory=dict)  # other columns of the row, where they were asked for
    images: tuple[ImageInfo, ...] = ()
    """What was found of its images, in the order of its image parts, once they have been looked at."""

    def name(self, index: int) -> str:
        """What the row calls its message of this index: messages[1], or response."""
        return self.names[index] if self.names else f"messages[{index}]"

    @property
    def answers(self) -> list[int]:
        """The indices of the messages that are trained."""
        return [n for n, message in enumerate(self.messages) if message.role == "assistant" and n >= self.context]
