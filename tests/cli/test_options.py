import itertools
import subprocess
import sys

import click
import pytest

from gemsmith.cli.main import cli, lazy_import, require_extra
from gemsmith.cli.options import Number
from gemsmith.errors import MachineError

HOLDER = """
import time
from pathlib import Path
from gemsmith.system.locks import locked
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


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("data.packing", "numpy", "data"),
        ("models.layers", "jax", "jax"),
        ("train.torch.images", "torch", "trl"),
        ("serve.client.batch", "httpx", "serve"),
        ("verify.logits", "numpy", "verify"),
    ],
)
def test_a_missing_library_is_one_line_with_the_extra_that_has_it(monkeypatch, module, library, extra):
    for name in list(sys.modules):
        if name == f"gemsmith.{module}":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    expected = rf"^{library} is not installed, which this needs; run: pip install 'gemsmith\[{extra}\]'$"
    with pytest.raises(MachineError, match=expected):
        lazy_import(module)


def test_a_stage_that_misses_a_library_while_it_runs_is_one_line_too(monkeypatch):
    from gemsmith.data import batches

    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(MachineError, match=r"^grain is not installed, .*'gemsmith\[data\]'$"), require_extra():
        batches.shuffled_order(3, 0)


def test_a_fault_of_gemsmiths_own_stays_a_fault():
    with pytest.raises(ModuleNotFoundError, match="gemsmith"):
        lazy_import("no_such_part")


def numbers(group: click.Group):
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from numbers(command)
        else:
            yield from (option for option in command.params if isinstance(option.type, click.FloatRange))


def test_no_option_takes_nan_or_infinity_for_a_number_in_its_range():
    found = list(numbers(cli))
    assert len(found) >= 9
    for option in found:
        for value in ("nan", "inf"):
            with pytest.raises(click.BadParameter):
                option.type.convert(value, option, None)
    assert Number(0, 2).convert("1.5", None, None) == 1.5
