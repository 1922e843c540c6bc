"""Files of the user's own, good and bad."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemsmith.errors import RecipeError
from gemsmith.tasks import find_generator, find_scorer
from gemsmith.tasks.base import Question

SCORER = "COLUMNS = ()\ndef score(question, answers):\n    return []\n"


@pytest.fixture
def write_task(tmp_path: Path) -> Callable[[str], str]:
    def write(code: str) -> str:
        file = tmp_path / "my_task.py"
        file.write_text(code)
        return str(file)

    return write


def test_a_file_is_run_once_for_each_content_and_says_so(write_task: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_task(f"print('hello')\n{SCORER}")
    assert find_scorer(file) is find_scorer(file)
    printed = capsys.readouterr()
    assert printed.out == "hello\n"
    said = " ".join(printed.err.split())
    assert said.startswith("eval.scorer: running the code of /") and said.endswith("…) in this process")
    first = find_scorer(file)
    assert find_scorer(write_task(f"{SCORER}# changed\n")) is not first


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def score(:", " line 1: is not Python (invalid syntax); mend it"),
        ("\n1 / 0", " cannot be loaded: ZeroDivisionError at line 2: division by zero; mend it"),
        ("raise SystemExit(0)", " cannot be loaded: SystemExit at line 1: 0; mend it"),
        ("COLUMNS = ()", ": has no function score(question, answers); add it"),
        ("COLUMNS = ()\nscore = 3", ": has no function score(question, answers); add it"),
        (
            "COLUMNS = ()\ndef score(one): ...",
            ": its score is called as score(question, answers), which it does not take; mend it",
        ),
        ("def score(question, answers): ...", ": its COLUMNS is None; it must be a tuple of the names"),
        (f"{SCORER}COLUMNS = 'abc'", ": its COLUMNS is 'abc'; it must be a tuple of the names"),
        (f"{SCORER}def check(): ...", ": its check is called as check(question), which it does not take; mend it"),
    ],
)
def test_what_is_wrong_with_a_scorers_file_is_one_line(write_task: Any, code: str, said: str) -> None:
    file = write_task(code)
    with pytest.raises(RecipeError) as error:
        find_scorer(file)
    assert str(error.value).startswith(f"eval.scorer: {file}{said}")


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"^eval\.scorer: .*/no\.py cannot be read \(No such file or directory\); name"
    ):
        find_scorer(str(tmp_path / "no.py"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def check(question):\n    return {}['x']", "check fails at line 3: KeyError at line 5: 'x'; mend the file"),
        ("def list_choices(question):\n    return []", "list_choices gave [] at line 3; it must be a list of texts"),
    ],
)
def test_what_a_file_says_of_a_row_fails_in_one_line(write_task: Any, body: str, said: str) -> None:
    scorer: Any = find_scorer(write_task(f"{SCORER}{body}\n"))
    with pytest.raises(RecipeError) as error:
        for function in ("check", "list_choices"):
            if hasattr(scorer, function):
                getattr(scorer, function)(Question(messages=(), expected="", origin="line 3"))
    assert str(error.value).endswith(f"my_task.py: {said}")


def test_rows_of_ones_own_are_made_and_no_more_than_were_asked_for(write_task: Any) -> None:
    maker = find_generator(
        write_task("import itertools\ndef generate_rows(rows, split, seed):\n    return itertools.count(seed)\n")
    )
    assert list(maker.generate_rows(3, "train", 5)) == [5, 6, 7]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "yield {}\n    yield 1 / 0",
            "generate_rows fails: ZeroDivisionError at line 3: division by zero; mend the file",
        ),
        ("yield {}", "generate_rows gave 1 of 3 rows; ask for fewer, or mend the file"),
        ("return None", "generate_rows fails: TypeError: 'NoneType' object is not iterable; mend the file"),
    ],
)
def test_rows_that_cannot_be_made_are_one_line(write_task: Any, body: str, said: str) -> None:
    file = write_task(f"def generate_rows(rows, split, seed):\n    {body}\n")
    with pytest.raises(RecipeError) as error:
        list(find_generator(file).generate_rows(3, "train", 0))
    assert str(error.value) == f"task: {file}: {said}"
