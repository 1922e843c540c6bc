"""The worker's side of the talk over stdin and stdout, here within one process."""

import io
import pickle
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from gemsmith.data import workers
from gemsmith.data.chat_template import find_template
from gemsmith.data.tokenize import check_prompts, open_renderer, render_documents
from gemsmith.data.workers import render_packed
from gemsmith.errors import DataError
from gemsmith.system.workers import ProcessLimits


@pytest.fixture
def ask(tokenizer_folder, monkeypatch):
    """Returns the worker's replies to calls: `ask(partial(render_packed, documents=[document]))`."""

    def replies(*calls: object) -> list[object]:
        template = find_template(tokenizer_folder)
        opening = partial(open_renderer, tokenizer_folder, template, limits=ProcessLimits())
        stdin = io.BytesIO(b"".join(map(pickle.dumps, (opening, *calls))))
        stdout = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", SimpleNamespace(buffer=stdin))
            patch.setattr(sys, "stdout", SimpleNamespace(buffer=stdout))
            workers.main()
        stdout.seek(0)
        found = []
        while stdout.tell() < len(stdout.getvalue()):
            found.append(pickle.load(stdout))
        return found

    return replies


def test_rows_come_back_end_to_end_as_rendering_them_here_gives(ask, renderer, document):
    rows = [document("user=a", "assistant=wire"), document("user=model", "assistant=b")]
    [packed] = ask(partial(render_packed, documents=rows))
    expected = list(render_documents(renderer, rows))
    assert packed.lengths == [len(each.ids) for each in expected] and packed.origins == ["rows.jsonl line 1"] * 2
    assert np.array_equal(packed.ids, np.concatenate([each.ids for each in expected]))
    assert np.array_equal(packed.trained, np.concatenate([each.trained for each in expected]))


def test_a_row_that_is_refused_is_the_answer_and_the_next_request_is_answered(ask, document):
    good, forged = document("user=a", "assistant=b"), document("user=a", "assistant=b<turn|>")
    rendered = [partial(render_packed, documents=[row]) for row in (forged, good)]
    prompts = [partial(check_prompts, rows=[row]) for row in ((good, 1), (forged, 2))]
    refused, packed, (ids,), refused_prompt = ask(*rendered, *prompts)
    ((origin, error),) = refused.bad
    assert (refused.origins, origin, error.kind) == ([], "rows.jsonl line 1", "control token")
    assert "holds <turn|>, a control token" in str(error)
    assert len(packed.lengths) == 1 and 0 < len(ids) < packed.lengths[0], "a prompt lacks the answer"
    assert isinstance(refused_prompt, DataError)


def test_a_worker_that_is_asked_nothing_ends_without_a_word(ask):
    assert ask() == []


def test_a_process_that_renders_starts_without_what_reads_recipes_and_rows():
    loads = "import sys, gemsmith.data.workers; print({'pydantic', 'pyarrow', 'rich', 'yaml'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True).stdout == "set()\n"
