"""The tree of errors. Whatever a user can cause is an `InputError`: one line, exit code 2."""

import difflib
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_LONGEST_LINE = 200


class GemsmithError(Exception):
    """Anything that Gemsmith raises on purpose. The message is one line for a person to act on."""

    exit_code = 1

    @property
    def problems(self) -> tuple[Any, ...]:
        """The error, or those that it is made of."""
        return (self,)


class InputError(GemsmithError):
    """What the user gave cannot be used: says what was given, what is allowed, what to do."""

    exit_code = 2


class ProblemsError(InputError):
    """Several things that are wrong, each an error of its own; the message has a line for each."""

    problems: tuple[Any, ...] = ()

    def __init__(self, problems: Sequence[InputError]) -> None:
        super().__init__("\n".join(" ".join(str(problem).split()) for problem in problems))
        self.problems = tuple(problems)


class RecipeError(InputError):
    """A recipe, or an override of it, that cannot be used; names the key."""


class RecipeProblemsError(ProblemsError, RecipeError):
    """Several things that are wrong with a recipe."""


class DataError(InputError):
    """A dataset that cannot be used; names the file and the line."""


class RowError(DataError):
    """A row that cannot be used; `kind` is the reason in a few words, which such rows are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[1])


class CheckpointError(InputError):
    """Weights, tokenizer or config that are missing, damaged, or contradict each other."""


class CorruptCheckpointError(CheckpointError):
    """A saved step of training that is not what was saved; the message is the reason, without the step's name."""


class RunError(InputError):
    """A run directory that cannot be used: another recipe's, or a stage that has not been run."""


class VersionError(RunError):
    """A record of another version of Gemsmith, which must not be taken for a damaged one and made again."""


class MachineError(InputError):
    """The machine lacks something: space, a free port, an accelerator, an installed extra."""


class EngineError(GemsmithError):
    """An engine that Gemsmith started (vLLM, its bench client) failed; the message ends with its last lines."""


class ScorerError(GemsmithError):
    """A scorer cannot judge an answer; raised by a scorer, the message is the reason alone, in two or three words."""


class VerifyError(GemsmithError):
    """The exported weights are not what training produced."""


class Terminated(SystemExit):
    """SIGTERM. No Exception, as KeyboardInterrupt is none, so that no library takes it for a failure of its own.

    A SystemExit, because event loops let no other BaseException through, and since uncaught it has the same exit code.
    """

    exit_code = code = 143


def as_one(problems: Sequence[InputError]) -> InputError:
    """The only one, or a ProblemsError of several."""
    if len(problems) == 1:
        return problems[0]
    return (RecipeProblemsError if {RecipeError} == {*map(type, problems)} else ProblemsError)(problems)


def raise_all(checks: Iterable[Callable[[], object]]) -> None:
    """Makes each check; raises as one what they raise."""
    problems = list[InputError]()
    for check in checks:
        try:
            check()
        except InputError as error:
            problems += error.problems
    if problems:
        raise as_one(problems)


def suggest(word: str, allowed: Iterable[str]) -> str:
    """Returns ` (did you mean X?)` for the allowed word closest to `word`, or an empty string.

    >>> suggest("gemma4-31", ["gemma4-31b", "gemma4-12b"])
    ' (did you mean gemma4-31b?)'
    """
    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]}?)" if matches else ""


def some(names: Iterable[str], most: int) -> str:
    """The first names, and how many more there are.

    >>> some("abcd", 2)
    'a, b and 2 more'
    """
    names = [*names]
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def first_line(error: object, *, otherwise: str | None = None) -> str:
    r"""The first line of a library's message that says anything; where none does, `otherwise` or the error's type.

    >>> first_line(ValueError("\n  no such file\nat line 3")), first_line(KeyError())
    ('no such file', 'KeyError')
    """
    return _lines(error, otherwise)[0]


def last_line(error: object) -> str:
    """The last such line: where a traceback of another process comes first, the reason is at the end."""
    return _lines(error)[-1]


def _lines(error: object, otherwise: str | None = None) -> list[str]:
    lines = [line.strip()[:_LONGEST_LINE] for line in str(error).splitlines() if line.strip()]
    return lines or [otherwise or type(error).__name__]


# What a disk or its permissions refuse: the user's to mend.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
_NO_FILE = (errno.ENOTSUP, errno.EFBIG, errno.ELOOP)
# A disk, a network folder or a mounted bucket that fails or is gone, and all open files that a user may have.
_FAILING = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.EMFILE, errno.ENFILE)
USERS_ERRNOS = (errno.ENOSPC, errno.EDQUOT, *_REFUSED, *_NO_FILE, *_FAILING)


def explain_os_error(error: OSError) -> str:
    """One line on an OSError that names a file or has one of USERS_ERRNOS."""
    place = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk{place}; free some and run the same command again, what is complete was kept"
    reason = error.strerror if error.errno in _NO_FILE else os.strerror(error.errno or 0).lower()
    if error.errno not in (*_REFUSED, *_NO_FILE):
        return f"{reason}{place}; see to that and run the same command again, what is complete was kept"
    return f"{reason}{place}; name another place, or change its permissions"
