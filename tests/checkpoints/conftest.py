"""Shared by the tests of checkpoints: the one line with which a source is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.errors import CheckpointError


@pytest.fixture
def refused() -> Callable[[object], str]:
    """Returns the message, of one line, with which a checkpoint is refused: `refused(folder)`."""

    def message_of(folder: Path | str) -> str:
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(str(folder))
        assert "\n" not in str(error.value)
        return str(error.value)

    return message_of
