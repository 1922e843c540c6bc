"""Rendering in several processes gives the bytes of rendering in one."""

import numpy as np
import pytest

from gemsmith.data import read_documents, workers
from gemsmith.data.render import open_renderer, render_documents
from gemsmith.data.rows import Document
from gemsmith.data.workers import count_processes, render_in_processes
from gemsmith.errors import DataError
from gemsmith.recipe import Made


def test_several_processes_render_what_one_does_in_its_order(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(workers, "_CHUNK", 5)
    folder = tiny_checkpoint("tiny-31b")
    documents = read_documents(Made(task="verilog", rows=63))
    expected = list(render_documents(open_renderer(folder), documents))
    found = list(render_in_processes(folder, None, documents, 2))
    assert [document.origin for document in found] == [document.origin for document in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert np.array_equal(mine.ids, theirs.ids) and np.array_equal(mine.trained, theirs.trained)
        assert (mine.ids.dtype, mine.trained.dtype) == (theirs.ids.dtype, theirs.trained.dtype)


def test_a_row_that_cannot_be_used_is_named(tiny_checkpoint):
    forged = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b<turn|>"})
    documents = [*read_documents(Made(task="verilog", rows=3)), Document(messages=forged, origin="rows.jsonl line 4")]
    with pytest.raises(DataError, match=r"rows.jsonl line 4: .*control token"):
        list(render_in_processes(tiny_checkpoint("tiny-31b"), None, documents, 2))


def test_few_rows_are_rendered_by_one_process(monkeypatch):
    documents = read_documents(Made(task="verilog", rows=20))
    assert count_processes(documents) == 1
    monkeypatch.setattr(workers, "_FEWEST_CHARACTERS", 10)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert count_processes(documents) == 3
