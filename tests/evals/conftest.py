from collections.abc import Iterator

import pytest

from gemsmith.data.dataset import read_dataset
from gemsmith.recipe.schema import GeneratedData
from gemsmith.tasks.messages import text_of
from support.hostile_server import Hostile, hostile_server

EVAL = {"scorer": "verilog-exact", "max_tokens": 64, "concurrency": 3}


@pytest.fixture(autouse=True)
def in_one_process(prompts_read_here: None) -> None:
    """All of these tests; that a process of its own reads the prompts is held by tests/data/test_workers.py."""


def held_out(rows: int) -> dict[str, str]:
    """Prompt -> answer of the rows that exported_run holds out."""
    documents = read_dataset(GeneratedData(task="verilog", rows=rows, split="held-out"), seed=0).documents
    return {text_of(document.messages[0]): text_of(document.messages[-1]) for document in documents}


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with hostile_server() as server:
        yield server
