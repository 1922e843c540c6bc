"""docs/first-model.md: its commands, run in order from an empty folder, print what the page shows."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "first-model.md").read_text(encoding="utf-8")
HOME = "/home/you/gemsmith"
"""What the page calls the folder of Gemsmith."""
QUICK = "## 5. Run"
"""The heading from which on there are minutes of work."""


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of the text with what the page shows of its output."""
    for block in re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, shown = re.split(r"(?<!\\)\n", part, maxsplit=1)  # a backslash continues the line
            yield command, shown


def pattern(shown: str) -> str:
    """What an output must be: … is the rest of a line, or on a line of its own any lines."""
    lines = shown.splitlines()
    return "".join("(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + "\n" for line in lines)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str, Mapping[str, str]], None]:
    """Runs the commands of a part of the page, in a folder beside the recipes, and compares their output."""
    home = tmp_path / "gemsmith"
    (home / "first").mkdir(parents=True)
    (home / "recipes").symlink_to(ROOT / "recipes")
    program = re.search(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert program
    (home / "first" / "rows.py").write_text(program[1], encoding="utf-8")

    def check(text: str, environment: Mapping[str, str]) -> None:
        found = [*commands(text)]
        assert len(found) > 3
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for command, shown in found:
            if command.startswith(("source ", "mkdir ")):
                continue
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=home / "first",
                env=os.environ | {"PATH": path} | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            said = done.stdout.replace(str(ROOT / "recipes"), f"{HOME}/recipes").replace(str(home), HOME)
            assert done.returncode == 0, f"{command}\n{said}"
            assert re.fullmatch(pattern(shown), said), f"{command}\n{said}"

    return check


def test_the_page_goes_from_an_empty_folder_to_rows_that_are_read(
    run: Callable[[str, Mapping[str, str]], None], fake_vllm: Callable[..., Path], tmp_path: Path
) -> None:
    python = tmp_path / "gemsmith" / ".venv-serve" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(fake_vllm())
    run(PAGE.partition(QUICK)[0], {"GEMSMITH_SERVE_PYTHON": str(python)})


@pytest.mark.vllm
def test_the_page_goes_on_to_a_model_that_is_talked_to(
    run: Callable[[str, Mapping[str, str]], None], tmp_path: Path
) -> None:
    (tmp_path / "gemsmith" / ".venv-serve").symlink_to(ROOT / ".venv-serve")
    run(PAGE, {"GEMSMITH_SERVE_PYTHON": str(tmp_path / "gemsmith" / ".venv-serve" / "bin" / "python")})


def test_output_that_differs_from_the_page_is_seen() -> None:
    assert re.fullmatch(pattern("a …\n…\nb\n"), "a 1\nx\ny\nb\n")
    assert not re.fullmatch(pattern("a …\n…\nb\n"), "a 1\nx\nc\n")
    assert not re.fullmatch(pattern("a\nb\n"), "a\nx\nb\n")
