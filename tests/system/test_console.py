"""Whatever is printed for a person shows every text as it is: no markup, nothing that the terminal would act on."""

import ast
import io
import re
from collections.abc import Iterator
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


def each_node() -> Iterator[tuple[str, ast.AST]]:
    """Every node of every source file, and where it stands."""
    assert len(FILES) > 100
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            yield f"{file}:{getattr(node, 'lineno', 0)}", node


def test_only_the_terminal_module_makes_what_prints():
    for where, node in each_node():
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "rich":
            assert {alias.name for alias in node.names} <= HARMLESS, f"{where}: from gemsmith.system.console instead"
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "rich" for alias in node.names), where
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            assert called not in ("Console", "Progress", "from_markup"), (
                f"{where}: from gemsmith.system.console instead"
            )
            assert not any(word.arg in ("markup", "emoji") for word in node.keywords), f"{where}: there is no markup"


def test_no_text_holds_markup():
    styles = "bold|dim|italic|red|green|yellow|cyan|blue|magenta|white"
    for where, node in each_node():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            markup = re.search(rf"\[/\]|\[/?({styles})\b[a-z ]*\]", node.value)
            assert not markup, f"{where}: make a Text of styled pieces"


def test_what_is_printed_without_a_console_is_spelled_out():
    for where, node in each_node():
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name, first = ast.unparse(node.func), ast.unparse(node.args[0])
        if name == "print" or (name == "click.echo" and any(keyword.arg == "err" for keyword in node.keywords)):
            assert "escape_control_chars(" in first, f"{where}: escape_control_chars what is printed"
        if name == "click.echo" and re.search("model_dump_json|as_json", first):
            assert "escape_control_chars" in first, f"{where}: escape_control_chars_json what is printed"
