"""A task of the user's own: one Python file that the recipe names, whose code runs in this process.

`eval.scorer: ./my_task.py` asks it for COLUMNS and score, `data.train: {task: ./my_task.py, rows: 100}` for
generate_rows; tasks/base.py says what these are. It is loaded only by commands that score or make rows.
"""

import contextlib
import functools
import hashlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from gemsmith.errors import GemsmithError, RecipeError, Terminated, first_line
from gemsmith.system.console import open_console
from gemsmith.system.files import regular_file
from gemsmith.tasks.base import DataGenerator, Question, Scorer

_FUNCTIONS = {
    "score": ("question", "answers"),
    "check": ("question",),
    "list_choices": ("question",),
    "generate_rows": ("rows", "split", "seed"),
}


def load_scorer(file: str) -> Scorer:
    """The scorer in a file. Raises RecipeError where there is none."""
    module = _load(file, "eval.scorer")
    where = f"eval.scorer: {file}"
    _check_functions(module, where, "score")
    for name in ("COLUMNS", "OPTIONAL_COLUMNS"):
        columns = getattr(module, name, () if name == "OPTIONAL_COLUMNS" else None)
        if not isinstance(columns, tuple) or not all(isinstance(column, str) for column in columns):
            allowed = "a tuple of the names of the columns that score reads, () for none"
            raise RecipeError(f"{where}: its {name} is {columns!r:.80}; it must be {allowed}")
    return module


def _checked(function: Callable[[Question], Any], name: str, where: str) -> Callable[[Question], Any]:
    """The same function of a question, whose mistakes are one line."""

    @functools.wraps(function)
    def call(question: Question) -> Any:
        with _one_line(f"{where}: {name} fails at {question.origin}"):
            found = function(question)
        if name == "list_choices" and not (
            isinstance(found, list | tuple) and found and all(isinstance(choice, str) and choice for choice in found)
        ):
            raise RecipeError(
                f"{where}: list_choices gave {found!r:.80} at {question.origin}; it must be a list of texts"
            )
        return found

    return call


def _counted(generate_rows: Callable[..., Any], where: str) -> Callable[..., Iterator[Mapping[str, Any]]]:
    """The same maker of rows, whose mistakes are one line; too few rows are one, too."""

    @functools.wraps(generate_rows)
    def make(rows: int, split: str, seed: int) -> Iterator[Mapping[str, Any]]:
        given = 0
        with _one_line(f"{where}: generate_rows fails"):
            for given, row in enumerate(islice(generate_rows(rows, split, seed), rows), start=1):  # noqa: B007
                yield row
        if given < rows:
            raise RecipeError(f"{where}: generate_rows gave {given} of {rows} rows; ask for fewer, or mend the file")

    return make


def load_generator(file: str) -> DataGenerator:
    """The maker of rows in a file. Raises RecipeError where there is none."""
    module = _load(file, "task")
    _check_functions(module, f"task: {file}", "generate_rows")
    return module


def _load(file: str, key: str) -> Any:
    path = Path(file)
    try:
        code = regular_file(path).read_bytes()
    except OSError as error:
        raise RecipeError(f"{key}: {file} cannot be read ({error.strerror or error}); name a Python file") from None
    return _run(path, code, key)


@functools.lru_cache
def _run(path: Path, code: bytes, key: str) -> ModuleType:
    """The module that the code makes, once for each content of the file."""
    digest = hashlib.sha256(code).hexdigest()
    open_console().print(f"{key}: running the code of {path} (SHA-256 {digest[:12]}…) in this process", style="yellow")
    module = ModuleType(f"gemsmith_own_{digest[:12]}")
    module.__file__ = str(path)
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)  # noqa: S102 - what the recipe asks for
    except SyntaxError as error:
        raise RecipeError(f"{key}: {path} line {error.lineno}: is not Python ({error.msg}); mend it") from None
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file can raise anything
        raise RecipeError(f"{key}: {path} cannot be loaded: {_explain(error)}; mend it") from None
    for name in ("check", "list_choices"):
        if callable(function := getattr(module, name, None)):
            setattr(module, name, _checked(function, name, f"{key}: {path}"))
    if callable(made := getattr(module, "generate_rows", None)):
        vars(module)["generate_rows"] = _counted(made, f"{key}: {path}")
    return module


def _check_functions(module: ModuleType, where: str, needed: str) -> None:
    for name, parameters in _FUNCTIONS.items():
        function = getattr(module, name, None)
        form = f"{name}({', '.join(parameters)})"
        if function is None and name != needed:
            continue
        if not callable(function):
            raise RecipeError(f"{where}: has no function {form}; add it")
        try:
            inspect.signature(function).bind(*parameters)
        except TypeError:
            raise RecipeError(f"{where}: its {name} is called as {form}, which it does not take; mend it") from None
        except ValueError:  # a builtin does not tell its parameters
            continue


@contextlib.contextmanager
def _one_line(failure: str) -> Iterator[None]:
    """Raises RecipeError, which begins with `failure`, for what the file's code raises."""
    try:
        yield
    except (GemsmithError, Terminated):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file can raise anything
        raise RecipeError(f"{failure}: {_explain(error)}; mend the file") from None


def _explain(error: BaseException) -> str:
    """`ZeroDivisionError at line 7: division by zero`, the line being the file's innermost."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_globals.get("__name__", "").startswith("gemsmith_own_")]
    place = f" at line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{place}: {first_line(error)}"
