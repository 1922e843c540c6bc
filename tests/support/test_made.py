import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.made import made_once

ANOTHER = """
import sys
from pathlib import Path
from support.made import made_once

def make(folder):
    folder.mkdir()
    (folder / "whose").write_text(sys.argv[2])
    with (folder.parent / "times").open("a") as times:
        times.write(sys.argv[2])

made_once(Path(sys.argv[1]), make)
"""


def test_of_several_processes_one_makes_it_and_all_find_it_whole(tmp_path):
    folder = tmp_path / "made"

    def ask(name):
        command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{ANOTHER}", folder, name]
        subprocess.run(command, check=True)
        return (folder / "whose").read_text()

    with ThreadPoolExecutor() as threads:
        found = list(threads.map(ask, "abc"))
    assert found == [(tmp_path / "times").read_text()] * 3


def test_what_failed_on_the_way_is_made_again_from_nothing(tmp_path):
    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise OSError

    with pytest.raises(OSError, match=r"^$"):
        made_once(tmp_path / "made", fail)
    assert not list(made_once(tmp_path / "made", Path.mkdir).iterdir())
