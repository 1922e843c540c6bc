"""Rendering in other processes gives the bytes of rendering in this one, and outlives what a template does there."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest

from gemsmith.data import workers
from gemsmith.data.chat_template import find_template
from gemsmith.data.dataset import Document, read_dataset
from gemsmith.data.tokenize import open_renderer, render_documents
from gemsmith.data.workers import check_prompts_in_process, count_processes, render_in_processes
from gemsmith.errors import DataError, MachineError
from gemsmith.recipe.schema import Data, GeneratedData
from gemsmith.system.workers import ProcessLimits
from gemsmith.tasks.messages import text_message


def test_several_processes_render_what_one_does_in_its_order(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(workers, "_CHUNK", 5)
    folder = tiny_checkpoint("tiny-31b")
    documents = read_dataset(GeneratedData(task="verilog", rows=63)).documents
    expected = list(render_documents(open_renderer(folder), documents))
    found = list(render_in_processes(folder, find_template(folder), documents, 2))
    assert [document.origin for document in found] == [document.origin for document in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert np.array_equal(mine.ids, theirs.ids) and np.array_equal(mine.trained, theirs.trained)
        assert (mine.ids.dtype, mine.trained.dtype) == (theirs.ids.dtype, theirs.trained.dtype)


@pytest.mark.parametrize("token", ["<turn|>", "<|tool_response>", "<|think|>"])
def test_a_row_that_cannot_be_used_is_named(token, tiny_checkpoint):
    forged = (text_message("user", "a"), text_message("assistant", f"b{token}"))
    documents = [
        *read_dataset(GeneratedData(task="verilog", rows=3)).documents,
        Document(messages=forged, origin="rows.jsonl line 4"),
    ]
    folder = tiny_checkpoint("tiny-31b")
    with pytest.raises(DataError, match=rf"rows.jsonl line 4: messages\[1\] holds {re.escape(token)}, a control token"):
        list(render_in_processes(folder, find_template(folder), documents, 2))


def test_few_rows_are_rendered_by_one_process(monkeypatch):
    documents = read_dataset(GeneratedData(task="verilog", rows=20)).documents
    assert count_processes(documents) == 1
    monkeypatch.setattr(workers, "_FEWEST_CHARACTERS", 10)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert count_processes(documents) == 3


# Two lists that are equal but share nothing, each twice as large to walk as the one before: a single comparison for
# ever.
TWINS = (
    "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] "
    "%}{% endfor %}"
    "{{ n.a == n.b }}"
)


@pytest.fixture
def talks(document):
    return [document("user=bad" if number == 7 else "user=a", "assistant=b") for number in range(10)]


def render_with(folder, text, documents, processes=1, **limits):
    (folder / "chat_template.jinja").write_text(text)
    with mock.patch.object(workers, "LIMITS", ProcessLimits(**limits)):
        return list(render_in_processes(folder, find_template(folder), documents, processes))


def for_the_bad_row(folder, body):
    return (folder / "chat_template.jinja").read_text() + "{% if messages[0].content == 'bad' %}" + body + "{% endif %}"


def test_a_template_that_loops_over_one_row_alone_ends_there_with_its_name(tokenizer_folder, talks):
    endless = for_the_bad_row(
        tokenizer_folder, "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    )
    talks[7] = Document(messages=talks[7].messages, origin="rows.jsonl line 8")
    with pytest.raises(
        DataError, match=r"rows.jsonl line 8: chat template .* line \d+ takes more than 1 s of CPU for one text"
    ):
        render_with(tokenizer_folder, endless, talks, cpu_s=1)


def test_a_single_step_without_end_is_ended_by_the_kernel(tokenizer_folder, talks):
    with pytest.raises(
        DataError, match=r"chat template .* takes more than 1 s of CPU in one step, at one of rows.jsonl line 1"
    ):
        render_with(tokenizer_folder, for_the_bad_row(tokenizer_folder, TWINS), talks, cpu_s=0.5)


def test_a_held_out_row_that_its_template_never_ends_with_is_refused_with_its_name(
    tokenizer_folder, talks, monkeypatch
):
    endless = for_the_bad_row(
        tokenizer_folder, "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    )
    (tokenizer_folder / "chat_template.jinja").write_text(endless)
    data = Data(train="-")
    monkeypatch.setattr(workers, "LIMITS", ProcessLimits(cpu_s=1))
    check_prompts_in_process(tokenizer_folder, data, [(talks[0], 1)])
    with pytest.raises(DataError, match=r"rows.jsonl line 1: chat template .* takes more than 1 s of CPU for one text"):
        check_prompts_in_process(tokenizer_folder, data, [(chat_loop, 1) for chat_loop in talks])


def test_the_second_render_that_control_tokens_are_told_by_is_within_the_limits(tokenizer_folder, talks):
    loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    text = (
        (tokenizer_folder / "chat_template.jinja").read_text()
        + "{% if messages[0].content == '.a.' %}"
        + loops
        + "{% endif %}"
    )
    with pytest.raises(DataError, match=r"rows.jsonl line 1: chat template .* takes more than 1 s of CPU for one text"):
        render_with(tokenizer_folder, text, talks, cpu_s=1)


@pytest.mark.slow
def test_memory_that_a_row_may_take_grows_with_the_row(tokenizer_folder, document):
    folder, chat_loop = tokenizer_folder, document("user=" + "é" * 3_000_000, "assistant=b")
    [rendered] = render_with(
        folder, (folder / "chat_template.jinja").read_text(), [chat_loop], memory_bytes=8 * 2**20, cpu_s=600
    )
    assert len(rendered.ids) > 6_000_000


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_dies_is_said_and_leaves_no_process(number, tokenizer_folder, talks, monkeypatch):
    started = []
    popen = subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        threading.Timer(0.1, started[-1].send_signal, [number]).start()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    error, message = (
        (MachineError, "was killed") if number == signal.SIGKILL else (DataError, r"crashes Python \(SIGSEGV\)")
    )
    with pytest.raises(error, match=message):
        render_with(tokenizer_folder, TWINS, talks)
    assert [process.poll() is not None for process in started] == [True]


def test_stopping_in_the_middle_does_not_wait_for_the_template(tokenizer_folder, talks):
    stop = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    stop.start()
    begin_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        render_with(tokenizer_folder, TWINS, talks, processes=2, cpu_s=1000)
    assert time.monotonic() - begin_s < 60


def test_a_file_of_a_librarys_name_in_the_working_directory_is_not_run(tokenizer_folder, talks, tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert len(render_with(tokenizer_folder, (tokenizer_folder / "chat_template.jinja").read_text(), talks)) == 10


def test_a_script_without_a_main_guard_can_render(tokenizer_folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from pathlib import Path\n"
        "from gemsmith.data.dataset import Document; from gemsmith.data.chat_template import find_template\n"
        "from gemsmith.data.workers import render_in_processes; from gemsmith.tasks.messages import text_message\n"
        "turns = (text_message('user', 'a'), text_message('assistant', 'b'))\n"
        "folder = Path(sys.argv[1])\n"
        "print(len(list(render_in_processes(folder, find_template(folder), [Document(messages=turns, origin='x')], "
        "1))))\n"
    )
    done = subprocess.run([sys.executable, script, tokenizer_folder], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
