"""Whatever is printed for a person shows every text as it is: no markup, nothing that the terminal would act on."""

import ast
import io
import re
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from gemsmith.system.console import open_console, open_progress, track

SOURCE = Path(__file__).parents[2] / "src" / "gemsmith"
FILES = sorted(file for file in SOURCE.rglob("*.py") if file.name != "console.py")
# What may be imported from Rich elsewhere: none of it reads markup on its own, or makes a console that does.
HARMLESS = {"box", "Table", "Text", "BarColumn", "MofNCompleteColumn", "Progress", "TimeElapsedColumn", "Console"}
EVIL = "[/a] [bold]b[/] :smile: \x1b[31mred \x9bK\r\u202ex"
SHOWN = r"[/a] [bold]b[/] :smile: \x1b[31mred \x9bK\r\u202ex"


def printed(show, *, terminal=False):
    out = io.StringIO()
    show(open_console(file=out, force_terminal=terminal, width=200, _environ={"TERM": "xterm", "NO_COLOR": "1"}))
    return out.getvalue()


@pytest.mark.parametrize(
    "show",
    [
        lambda console: console.print(EVIL),
        lambda console: console.print(EVIL, style="bold"),
        lambda console: console.log(EVIL, log_locals=False),
    ],
)
@pytest.mark.parametrize("terminal", [False, True])
def test_a_printed_text_is_shown_letter_for_letter(show, terminal):
    assert SHOWN in printed(show, terminal=terminal)


def test_text_pieces_and_cells_of_tables_are_shown_letter_for_letter():
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    assert printed(lambda console: console.print(table)).count(SHOWN) == 3
    # A Text has lost its carriage return by itself.
    assert SHOWN.replace(r"\r", "") in printed(lambda console: console.print(Text.assemble((EVIL, "red"), "")))


def test_spinners_and_progress_bars_show_texts_letter_for_letter():
    def spin(console):
        with console.status(EVIL) as status:
            status.update(EVIL)

    def wait(console):
        with open_progress(console, transient=False) as progress:
            progress.add_task(EVIL, total=1)

    assert SHOWN in printed(spin, terminal=True)
    assert SHOWN in printed(wait, terminal=True)


def test_a_tracked_list_comes_as_it_is():
    found = []
    printed(lambda console: found.extend(track([1, 2, 3], EVIL, console)), terminal=True)
    assert found == [1, 2, 3]


def test_the_source_files_are_found():
    assert len(FILES) > 100


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_only_the_terminal_module_makes_what_prints(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "rich":
            assert {alias.name for alias in node.names} <= HARMLESS, (
                f"{file}:{node.lineno}: from gemsmith.system.console instead"
            )
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "rich" for alias in node.names), f"{file}:{node.lineno}"
        elif isinstance(node, ast.Call):
            called = (
                node.func.id
                if isinstance(node.func, ast.Name)
                else node.func.attr
                if isinstance(node.func, ast.Attribute)
                else ""
            )
            assert called not in ("Console", "Progress", "from_markup"), (
                f"{file}:{node.lineno}: from gemsmith.system.console instead"
            )
            assert not any(keyword.arg in ("markup", "emoji") for keyword in node.keywords), (
                f"{file}:{node.lineno}: there is no markup"
            )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_text_holds_markup(file):
    styles = "bold|dim|italic|red|green|yellow|cyan|blue|magenta|white"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.search(rf"\[/\]|\[/?({styles})\b[a-z ]*\]", node.value), (
                f"{file}:{node.lineno}: make a Text of styled pieces"
            )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_what_is_printed_without_a_console_is_spelled_out(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = ast.unparse(node.func)
        if name == "print" or (name == "click.echo" and any(keyword.arg == "err" for keyword in node.keywords)):
            assert "escape_control_chars(" in ast.unparse(node.args[0]), (
                f"{file}:{node.lineno}: escape_control_chars what is printed"
            )
        if name == "click.echo" and re.search("model_dump_json|as_json", ast.unparse(node.args[0])):
            assert "escape_control_chars" in ast.unparse(node.args[0]), (
                f"{file}:{node.lineno}: escape_control_chars_json what is printed"
            )
