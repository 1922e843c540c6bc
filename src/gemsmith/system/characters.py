"""Characters that a terminal acts on instead of showing them, spelled out.

A name, a row or a log may hold them: they recolor, delete or reorder text on the screen, so that it seems another.
"""

import json
import re
from typing import Any

# The controls but for tab and line feed, the marks that reorder text, break lines or are not seen, halves of surrogate
# pairs, tags. Not the two joiners of U+200C, which emoji and several scripts are written with.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def escape_control_chars(text: str, *, lines: bool = True) -> str:
    r"""The text with such characters written as Python writes them; line feeds, too, where it is to be one line.

    >>> print(escape_control_chars("a\x1b[31mb"), escape_control_chars("a\nb", lines=False))
    a\x1b[31mb a\nb
    """
    spelled = _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return spelled if lines else spelled.replace("\n", r"\n")


def one_line(text: str) -> str:
    r"""The text as a comment behind something: nothing in it ends the line, in YAML, a shell or a terminal.

    >>> one_line("a table,\n  read\u2028today\n")
    'a table, read today'
    """
    return escape_control_chars(" ".join(text.split()))


def yaml_line(value: Any) -> str:
    r"""A scalar or list as one line of YAML, which JSON's is but for such characters.

    >>> print(yaml_line(["a\nb", "\x85"]))
    ["a\nb", "\U00000085"]
    """
    return _UNSEEN.sub(lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False))


def escape_control_chars_json(document: str) -> str:
    """The same JSON value with such characters written as JSON escapes, as those below U+0020 must be anyway."""
    return _UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1] if found[0] > "\x1f" else found[0], document)


def is_utf_8(name: str) -> bool:
    """False for a file's name whose bytes are not, which Python has as halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in name)
