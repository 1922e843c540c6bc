"""One of the processes that train together on this machine: `python -m gemsmith.train.worker RUN [--fresh] < recipe.json`."""

import os
import sys
from pathlib import Path

from gemsmith.errors import GemsmithError
from gemsmith.recipe import Recipe
from gemsmith.run import Run


def main() -> int:
    """Trains, and returns the exit code; the reason of a failure goes to stderr, once where it is the same in all processes."""
    from gemsmith.train.trl import train_with_trl

    run = Run(path=Path(sys.argv[1]), recipe=Recipe.model_validate_json(sys.stdin.read()))
    try:
        train_with_trl(run, fresh="--fresh" in sys.argv[2:])
    except GemsmithError as error:
        if os.environ["RANK"] == "0":
            print(f"{'error' if error.exit_code in (1, 2) else 'note'}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
