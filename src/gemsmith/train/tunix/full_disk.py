"""A full disk as one line: Orbax and tensorstore raise it as text, and print a traceback for each array."""

import logging
import sys
import warnings
from functools import partial
from typing import Any

_FULL = ("No space left on device", "ENOSPC", "Disk quota exceeded")
# Said by what is still under way once the save has failed, and its event loop is closed, or the interpreter ends.
_LEFT_OVER = ("Event loop is closed", "cannot schedule new futures after")
_LOGGERS = ("absl", "asyncio")


def is_full_disk(error: BaseException | None) -> bool:
    """Whether the error, or one that it came of, says that the disk has no space left for this user."""
    while error is not None:
        if any(words in str(error) for words in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def drop_tracebacks_of_a_full_disk() -> None:
    """From here on, what threads that save log and print of a full disk is left out.

    It stays so until the process ends, since these threads outlive the save. Whatever else they say is printed as
    before.
    """
    for logger in map(logging.getLogger, _LOGGERS):
        if _says_more not in logger.filters:
            logger.addFilter(_says_more)
    # Of writes that had been made and not begun when the save failed.
    warnings.filterwarnings("ignore", "coroutine '.*write_fragment' was never awaited", RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _print_unless_left_over:
        sys.unraisablehook = partial(_print_unless_left_over, sys.unraisablehook)


def _says_more(record: logging.LogRecord) -> bool:
    """Whether a record is about anything but a full disk and what comes of it."""
    error = record.exc_info[1] if record.exc_info else None
    return not (is_full_disk(error) or any(words in record.getMessage() for words in (*_FULL, *_LEFT_OVER)))


def _print_unless_left_over(before: Any, swallowed: Any) -> None:
    """A write that ends after its save has failed has no caller to raise it to, so tensorstore has it printed."""
    if not any(words in str(swallowed.exc_value) for words in _LEFT_OVER):
        before(swallowed)
