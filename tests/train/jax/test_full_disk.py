import asyncio
import errno
import logging
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from gemsmith.export.adapters import read_run_adapter
from gemsmith.runs.run import Run, find_run
from gemsmith.train.jax.backend import drop_tracebacks_of_a_full_disk, is_full_disk
from gemsmith.train.stage import train

FULL = OSError(errno.ENOSPC, "No space left on device")
TENSORSTORE = ValueError(
    'RESOURCE_EXHAUSTED: Error writing local file "f": Failed to write 7 bytes: No space left on device'
)


@pytest.fixture
def dropping(monkeypatch):
    """As in a training; afterwards all is as before. Returns what Python was left to print of swallowed exceptions."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    before = {name: list(logging.getLogger(name).filters) for name in ("absl", "asyncio")}
    drop_tracebacks_of_a_full_disk()
    drop_tracebacks_of_a_full_disk()
    yield printed
    for name, filters in before.items():
        logging.getLogger(name).filters[:] = filters


@pytest.mark.slow
@pytest.mark.parametrize("size", ["300k", "700k", "50m,nr_inodes=4"])  # room for no step, for some, for no folder
def test_a_full_disk_is_one_line_and_training_goes_on_once_there_is_room(prepare, small_disk, tmp_path, size):
    keys = {"lora": {"rank": 32}, "train": {"save_steps": 1, "save_total_limit": 2}}
    whole, run = (prepare(tmp_path / name, **keys) for name in ("whole", "run"))
    train(whole)
    small_disk(run.checkpoints, size)
    command = [sys.executable, "-m", "gemsmith", "train", str(run.path)]
    # Sooner than Orbax's threads give up.
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("train")]
    assert len(lines) == 1 and lines[0].startswith(
        f"error: no space left on device while writing under {run.path}; "
    ), ended.stderr
    saved = [int(folder.name) for folder in run.checkpoints.iterdir() if folder.name.isdecimal()]
    subprocess.run(["mount", "-o", "remount,size=50m,nr_inodes=9999", str(run.checkpoints)], check=True)
    record = train(Run(path=run.path, recipe=find_run(run.path)))
    assert record.resumed_at == tuple([max(saved)] if saved else [])
    found, wanted = (read_run_adapter(each, 6).modules for each in (run, whole))
    for name, pair in wanted.items():
        assert (found[name].a.tobytes(), found[name].b.tobytes()) == (pair.a.tobytes(), pair.b.tobytes()), name


@pytest.mark.parametrize("error", [FULL, TENSORSTORE, OSError(errno.EDQUOT, "Disk quota exceeded")])
def test_what_says_that_the_disk_is_full_is_known_by_its_words_and_its_cause(error):
    later = RuntimeError("the save failed")
    later.__cause__ = error
    assert is_full_disk(error) and is_full_disk(later)
    assert not is_full_disk(ValueError("RESOURCE_EXHAUSTED: Out of memory")) and not is_full_disk(None)


@pytest.mark.parametrize("name", ["absl", "asyncio"])
def test_of_what_threads_log_only_a_full_disk_and_a_stop_are_left_out(dropping, caplog, monkeypatch, name):
    # A damaged checkpoint that an earlier test of this process has read mutes asyncio.
    monkeypatch.setattr(logging.getLogger(name), "disabled", False)
    for error in (FULL, TENSORSTORE, KeyboardInterrupt(), PermissionError(errno.EACCES, "Permission denied")):
        logging.getLogger(name).error("the save failed", exc_info=error)
    logging.getLogger(name).error("raised an exception: %s", FULL)
    logging.getLogger(name).warning("a warning")
    assert [record.getMessage() for record in caplog.records if record.name == name] == ["the save failed", "a warning"]
    assert "Permission denied" in caplog.text


def test_of_swallowed_exceptions_only_those_are_left_out_that_come_of_a_save_which_has_failed(dropping):
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError) as closed:
        loop.call_soon_threadsafe(print)
    other = SimpleNamespace(exc_type=RuntimeError, exc_value=RuntimeError("another"), object=None)
    swallowed = [SimpleNamespace(exc_type=RuntimeError, exc_value=closed.value, object=None), other]
    thread = threading.Thread(target=lambda: [sys.unraisablehook(each) for each in swallowed])
    thread.start()
    thread.join()
    assert dropping == [other]
