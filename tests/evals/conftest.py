from collections.abc import Iterator

import pytest

from gemsmith.testing.hostile import Hostile, hostile_server


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with hostile_server() as server:
        yield server
