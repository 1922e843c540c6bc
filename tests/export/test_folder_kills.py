"""Exports without a run that are killed: the old or the new one is whole."""

import signal
import subprocess
import sys
import time

import pytest

from gemsmith.checkpoints.peft import write_peft_adapter
from gemsmith.export.stage import export_peft

_STOPPED_AT = """
import os, signal, sys
from pathlib import Path
from gemsmith.export import stage as folder, merge
import gemsmith.runs.run as run
moment, base, adapter, out = sys.argv[1:]
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
count = 0
if moment == "adapter":
    write = folder.peft.write_peft_adapter
    folder.peft.write_peft_adapter = lambda *given, **named: die(write(*given, **named))
elif moment == "middle":
    rows = merge.merged_rows
    def later(*arguments):
        global count
        count += 1
        return die() if count == 20 else rows(*arguments)
    merge.merged_rows = later
elif moment == "record":
    run.write_text = die
else:
    rename, wanted = Path.rename, {"before": 0, "between": 1, "after": 2}[moment]
    def counted(self, target):
        global count
        if count == wanted:
            die()
        count += 1
        rename(self, target)
        if wanted == 2 and count == 2:
            die()
    Path.rename = counted
folder.export_peft(base, Path(adapter), Path(out), force=True)
"""


@pytest.mark.parametrize("moment", ["adapter", "middle", "record", "before", "between", "after"])
def test_killed_at_any_moment_the_old_or_the_new_export_is_whole_and_the_next_starts_clean(
    base, adapter, adapter_of, tmp_path, moment, contents, verify_files
):
    out = tmp_path / "out"
    export_peft(str(base), adapter, out)
    old = contents(out)
    write_peft_adapter(adapter_of("tiny-31b", seed=9), adapter, "base")
    child = subprocess.run(
        [sys.executable, "-c", _STOPPED_AT, moment, base, adapter, out], capture_output=True, check=False
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    if moment == "between":
        assert contents(tmp_path / ".out.old") == old and not out.exists()
    elif moment == "after":
        assert verify_files(out) and contents(out) != old
    else:
        assert contents(out) == old
    export_peft(str(base), adapter, out, force=True)
    assert (
        verify_files(out)
        and contents(out)["adapter/adapter_model.safetensors"] != old["adapter/adapter_model.safetensors"]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1])
def test_killed_by_the_clock_nothing_half_written_has_the_targets_name(base, adapter, tmp_path, delay_s, verify_files):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "gemsmith", "export", "--base", base, "--adapter", adapter, "--out", out]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (tmp_path / ".out.partial").exists():
        time.sleep(0.001)
    time.sleep(delay_s)
    child.kill()
    child.wait()
    assert not out.exists() or verify_files(out)
    export_peft(str(base), adapter, out, force=True)
    assert verify_files(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]
