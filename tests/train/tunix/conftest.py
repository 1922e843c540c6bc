"""Runs that something stops."""

import os
import signal
from collections.abc import Callable

import pytest

from gemsmith.data import Batches


@pytest.fixture
def interrupt() -> Callable[..., None]:
    def interrupt(monkeypatch: pytest.MonkeyPatch, *, at: int, by: signal.Signals | type[BaseException]) -> None:
        """Lets the batch of step `at` raise an error or send a signal."""
        batch = Batches.batch

        def interrupted(self, step, rows):
            if step == at:
                if isinstance(by, signal.Signals):
                    os.kill(os.getpid(), by)
                else:
                    raise by
            return batch(self, step, rows)

        monkeypatch.setattr(Batches, "batch", interrupted)

    return interrupt
