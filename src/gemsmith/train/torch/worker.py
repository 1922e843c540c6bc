"""One of several training processes: `python -m gemsmith.train.torch.worker RUN [--restart] < recipe.json`."""

import ctypes
import os
import signal
import sys
from pathlib import Path

from gemsmith.errors import GemsmithError, MachineError, Terminated
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.run import Run
from gemsmith.system.characters import escape_control_chars
from gemsmith.train.torch.distributed import LAUNCHER, LOST_ANOTHER

_PR_SET_PDEATHSIG = 1
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


def main() -> int:
    """Trains, and returns the exit code.

    Why it failed goes to stderr; of all but the first process to stdout, which is told where that one did not fail.
    """
    _end_with_launcher()
    from gemsmith.train.torch.backend import train_with_trl

    run, rank = Run(path=Path(sys.argv[1]), recipe=Recipe.model_validate_json(sys.stdin.read())), os.environ["RANK"]
    try:
        train_with_trl(run, restart="--restart" in sys.argv[2:])
    except Terminated as error:  # whoever started it says so, once for all
        return error.exit_code
    except GemsmithError as error:
        told = rank == "0" or isinstance(error, MachineError)
        print(escape_control_chars(f"error: {error}"), file=sys.stderr if told else sys.stdout)
        return error.exit_code
    except RuntimeError as error:
        if not any(words in str(error) for words in _LOST):
            raise
        print(escape_control_chars(f"note: process {rank} lost another"), file=sys.stderr)
        return LOST_ANOTHER
    except KeyboardInterrupt:
        return 130
    return 0


def _end_with_launcher() -> None:
    """From here on, the death of the process that started this one, whose lock is then gone, ends it at once."""
    if sys.platform == "linux" and LAUNCHER in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(os.environ[LAUNCHER]):
            sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
