"""Where Gemsmith writes for a person: a Rich console that shows every text as it is, whoever wrote it.

Rich reads `[/a]` in a text as markup, also where it is the name of a run. So there is no markup here: what is to be in
color is a Text of styled pieces. Consoles, progress bars and spinners are made here and nowhere else;
tests/system/test_console.py holds that.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from gemsmith.system.characters import escape_control_chars, one_line

Item = TypeVar("Item")


def open_console(*, stderr: bool = True, soft_wrap: bool = True, **options: Any) -> Console:
    """A console on stderr, or stdout; lines are left to the terminal to wrap, which tables are not to be."""
    return _LiteralConsole(stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False, **options)


def print_warnings(stage: str, warnings: Iterable[str], *, critical: Iterable[str] = ()) -> None:
    """A line on stderr for each warning of a stage, the critical ones first."""
    console = open_console()
    for kind, style, texts in (("critical", "bold red", critical), ("warning", "yellow", warnings)):
        for text in texts:
            console.print(Text.assemble((f"{stage}: {kind}: ", style), one_line(text)))


def open_progress(console: Console, *columns: ProgressColumn, transient: bool = True) -> Progress:
    """A progress bar, gone once it is done unless told to stay; not shown where the console is no terminal."""
    shown = columns or (LiteralColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*shown, console=console, transient=transient, disable=not console.is_terminal)


def track(items: Sequence[Item], description: str, console: Console) -> Iterator[Item]:
    """The items, with a progress bar."""
    with open_progress(console) as progress:
        yield from progress.track(items, description=description)


class _LiteralConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        # Before Rich makes a Text of it, which drops some of these characters in silence.
        return super().render_str(escape_control_chars(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_control_chars(segment.text))

    def status(self, status: RenderableType, **options: Any) -> Status:
        return _LiteralStatus(_literal(status), console=self, **options)


class LiteralColumn(TextColumn):
    """A column of a progress bar, such as LiteralColumn("{task.description}")."""

    def render(self, task: Task) -> Text:
        return Text(escape_control_chars(self.text_format.format(task=task)), style=self.style, justify=self.justify)


class _LiteralStatus(Status):
    def update(self, status: RenderableType | None = None, **options: Any) -> None:
        super().update(None if status is None else _literal(status), **options)


def _literal(shown: RenderableType) -> RenderableType:
    return Text(escape_control_chars(shown)) if isinstance(shown, str) else shown
