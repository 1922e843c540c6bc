import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gemsmith.cli import cli

RECIPE = "checkpoint: {checkpoint}\ndata: {{train: {{task: verilog, rows: 20}}, max_length: 256}}\n"
VERBS = ["run", "plan", "data", "train", "export", "verify", "serve", "bench", "eval", "report"]


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my.yaml"
    file.write_text(RECIPE.format(checkpoint=tiny_checkpoint("tiny-31b")))
    return file


def test_every_verb_is_there_and_has_help(gemsmith):
    assert set(VERBS) <= set(cli.commands)
    for verb in VERBS:
        code, out, _ = gemsmith(verb, "--help")
        assert code == 0
        assert "--set" in out and "--json" in out and "--run" in out, verb
        assert f"  gemsmith {verb} " in out and "\\b" not in out, verb


def test_the_version_is_printed(gemsmith):
    assert gemsmith("--version")[:2] == (0, "gemsmith, version 0.1.0\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_a_shell(gemsmith, shell):
    if shell == "bash" and sys.platform != "linux":
        pytest.skip("click asks the machine's bash for its version")
    code, out, _ = gemsmith("completion", shell)
    assert code == 0 and "_GEMSMITH_COMPLETE" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan", "nothing.yaml"], "nothing.yaml: is neither a recipe nor a run directory"),
        (["plan", "my.yaml", "--set", "lora.rnak=3"], "unknown key lora.rnak (did you mean rank?)"),
        (["plan", "my.yaml", "--set", "model=gemma4-31"], "did you mean gemma4-31b?"),
        (["plan", "my.yaml", "--set", "lora.rank=many"], "lora.rank: 'many' was given"),
        (["plan", "my.yaml", "--set", "model=tiny-12b"], "tiny-12b"),
        (["plan", "my.yaml", "--set", "hardware.machines=[v5p-9]"], "did you mean v5p-8?"),
        (["plan", "my.yaml", "--set", "checkpoint=no/such/folder"], "is neither a folder"),
        (["plan", "my.yaml", "--set", "data.max_length=1000000"], "reads at most 2048 tokens"),
        (["data", "my.yaml", "--set", "data.train=missing.jsonl"], "missing.jsonl"),
        (["export", "my.yaml"], "train.json: is not there; run first: gemsmith train runs/my"),
        (["report", "."], "holds no recipe.yaml"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(gemsmith, recipe, arguments, expected):
    code, out, err = gemsmith(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert expected in err


def test_a_plan_without_a_run_directory_writes_nothing(gemsmith, recipe, tmp_path):
    before = set(tmp_path.iterdir())
    code, out, _ = gemsmith("plan", recipe, "--json")
    assert code == 0
    assert {machine["name"] for machine in json.loads(out)["machines"]} == {"v5p-8", "v6e-8", "2xh100"}
    assert set(tmp_path.iterdir()) == before


def test_data_writes_its_record_and_the_resolved_recipe(gemsmith, recipe, tmp_path):
    code, out, _ = gemsmith("data", recipe, "--json", "--run", "out")
    record = json.loads(out)
    assert (code, record["rows"], record["dropped"]) == (0, 20, {})
    assert json.loads((tmp_path / "out" / "data.json").read_text()) == record
    assert (
        'model: "tiny-31b"  # read from the checkpoint\'s config.json' in (tmp_path / "out" / "recipe.yaml").read_text()
    )


def test_a_complete_stage_is_not_done_again_unless_forced(gemsmith, recipe, tmp_path):
    gemsmith("data", recipe)
    file = tmp_path / "runs" / "my" / "data.json"
    before = file.read_bytes()
    assert "--force" in gemsmith("data", recipe)[2]
    assert file.read_bytes() == before
    gemsmith("data", "runs/my", "--force")
    assert json.loads(file.read_bytes())["rows_sha256"] == json.loads(before)["rows_sha256"]


def test_a_forced_stage_that_fails_leaves_the_earlier_one_whole(gemsmith, recipe, tmp_path):
    gemsmith("data", recipe)
    run = tmp_path / "runs" / "my"
    before = {file: file.read_bytes() for file in (run / "data.json", *sorted((run / "data").iterdir()))}
    code, _, err = gemsmith("data", recipe, "--set", "data.max_length=8", "--force")
    assert code == 2 and "so none is left" in err
    assert {file: file.read_bytes() for file in before} == before
    assert "data is complete" in gemsmith("data", recipe)[2]


def test_stopped_once_rows_are_replaced_no_record_tells_of_other_rows(gemsmith, recipe, tmp_path, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    gemsmith("data", recipe)
    with monkeypatch.context() as patch:
        patch.setattr("gemsmith.data.stage.make_origin", stop)
        assert gemsmith("data", "runs/my", "--force")[0] == 130
    assert not (tmp_path / "runs" / "my" / "data.json").exists()
    assert gemsmith("data", recipe)[0] == 0


def test_another_recipe_in_the_same_run_directory_is_refused(gemsmith, recipe):
    gemsmith("data", recipe)
    code, _, err = gemsmith("data", recipe, "--set", "data.max_length=128")
    assert code == 2 and "data.max_length is 256 there and 128 here, and data has used it" in err
    assert gemsmith("data", recipe, "--set", "data.max_length=512", "--force")[0] == 0
    assert "data is complete" in gemsmith("data", recipe, "--set", "data.max_length=512")[2]


def test_rows_that_changed_since_they_were_read_are_refused(gemsmith, recipe, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hi", "response": "hello"}\n')
    assert gemsmith("data", recipe, "--set", f"data.train={rows}")[0] == 0
    assert gemsmith("data", "runs/my")[0] == 0
    rows.write_text('{"prompt": "hi", "response": "hello there"}\n')
    code, _, err = gemsmith("data", "runs/my")
    assert code == 2 and "has changed since" in err
    assert gemsmith("data", "runs/my", "--force")[0] == 0


def test_rows_are_shown_with_what_is_trained_on(gemsmith, recipe):
    code, out, _ = gemsmith("data", recipe, "--show", 1)
    assert code == 0
    assert "module" in out and "<turn|>" in out


def test_rows_are_shown_where_the_locale_has_no_such_letters(gemsmith, recipe):
    assert gemsmith("data", recipe)[0] == 0
    command = [sys.executable, "-m", "gemsmith", "data", str(recipe), "--show", "1"]
    shown = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, check=False, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert r"\u27e6" in shown.stdout


def test_a_report_of_a_run_with_quotes_in_its_name_is_json(gemsmith, recipe):
    assert gemsmith("data", recipe, "--run", 'runs/"a"')[0] == 0
    code, out, _ = gemsmith("report", 'runs/"a"', "--json")
    assert code == 0 and json.loads(out) == {"report": 'runs/"a"/report.html'}


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_meets_the_garbage_collector_is_not_lost(gemsmith, monkeypatch, number, expected):
    def collect() -> None:
        sent = []

        def callback(phase: str, _: object) -> None:
            if not sent:
                sent.append(phase)
                os.kill(os.getpid(), number)

        gc.callbacks.append(callback)
        try:
            gc.collect()
            assert sent
            time.sleep(10)
        finally:
            gc.callbacks.remove(callback)

    monkeypatch.setattr(cli.commands["schema"], "callback", collect)
    code, out, err = gemsmith("schema")
    assert (code, out) == (expected, "") and err.strip().startswith("note: stopped by") and "Traceback" not in err


def test_a_folder_that_cannot_be_written_is_one_line(gemsmith, recipe, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = gemsmith("data", recipe, "--run", "file/run")
    assert code == 2 and err.count("\n") == 1 and "not a directory" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs takes root")
@pytest.mark.parametrize("size", ["48k", "200k"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_space(gemsmith, recipe, tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=False, capture_output=True
    ).returncode:
        pytest.skip("this machine does not let a tmpfs be mounted")
    try:
        code, _, err = gemsmith("data", recipe, "--set", "data.train.rows=3000", "--run", disk / "run")
        assert code == 2 and "no space left on" in err.lower() and err.strip().count("\n") == 0
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        assert gemsmith("data", recipe, "--set", "data.train.rows=3000", "--run", disk / "run")[0] == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


HOLDER = """
import time
from pathlib import Path
from gemsmith.lock import locked
with locked(Path("runs/my")):
    print(flush=True)
    time.sleep(300)
"""
WRITING = ["run", "plan", "data", "train", "export", "verify", "serve", "serve --json", "bench", "eval", "report"]


def test_while_one_command_uses_a_run_directory_no_other_writes_there(gemsmith, recipe, tmp_path):
    gemsmith("data", recipe)
    before = {
        file: file.read_bytes()
        for file in (tmp_path / "runs" / "my").rglob("*")
        if file.is_file() and file.name != ".lock"
    }
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        for verb, source in itertools.product(WRITING, (str(recipe), "runs/my")):
            if (verb, source) == ("plan", str(recipe)):
                continue  # writes nothing
            code, _, err = gemsmith(*verb.split(), source, *([] if verb == "serve" else ["--set", "bench.prompts=7"]))
            assert code == 2 and err.count("\n") == 1 and f"is in use by `gemsmith` (process {holder.pid} on " in err, (
                verb,
                source,
                err,
            )
        assert gemsmith("data", "runs/my", "--show", 1)[0] == 0
    finally:
        holder.kill()
        holder.communicate()
    assert {
        file: file.read_bytes()
        for file in (tmp_path / "runs" / "my").rglob("*")
        if file.is_file() and file.name != ".lock"
    } == before
    assert gemsmith("report", "runs/my")[0] == 0


def test_a_folder_that_is_no_run_is_left_as_it_is(gemsmith, recipe, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").touch()
    assert "is not empty and holds no recipe.yaml" in gemsmith("data", recipe, "--run", "thesis")[2]
    assert "holds no recipe.yaml" in gemsmith("data", "thesis")[2]
    assert gemsmith("data", recipe, "--run", "new", "--set", "lora.rank=none")[0] == 2
    assert [file.name for file in (tmp_path / "thesis").iterdir()] == ["thesis.tex"] and not (tmp_path / "new").exists()


ODD = "[/a]\x1b[31m\x9b\u202e"


def test_a_run_named_like_markup_or_colours_is_shown_as_it_is_called(gemsmith, recipe):
    for _ in range(2):
        code, out, err = gemsmith("data", recipe.name, "--run", ODD, "--show", 1)
        assert code == 0, err
        assert not set(ODD[4:]) & set(out + err) - set("[31m")
    assert r"data is complete in [/a]\x1b[31m\x9b\u202e" in err
    code, out, err = gemsmith("report", ODD)
    assert code == 0 and out.endswith("[/a]\\x1b[31m\\x9b\\u202e/report.html\n")


def test_what_an_error_quotes_is_spelled_out_on_its_one_line(gemsmith, recipe, tmp_path):
    for arguments in (
        ("data", "no\nsuch\x1b[2J.yaml"),
        ("plan", recipe.name, "--set", "a\nb\x9b=1"),
        ("no\x1bsuch",),
        ("plan", "--\x1b\n"),
    ):
        code, _, err = gemsmith(*arguments)
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
        assert not set("\x1b\x9b") & set(err) and (r"\x1b" in err or r"\x9b" in err)
    (tmp_path / "own.jinja").write_text("{{ raise_exception('no\x1b[31m\nway\u202e') }}")
    code, _, err = gemsmith("data", recipe.name, "--set", "data.template=own.jinja")
    assert code == 2 and err.endswith(
        "own.jinja line 1 refuses it: no\\x1b[31m way\\u202e; change the row, or set data.template to one that takes "
        "it\n"
    )
    assert err.count("\n") == 1
