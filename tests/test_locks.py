"""The locks' hashes: of every file that pip may choose for a pin, and of no other."""

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.tags import parse_tag
from pip._internal.models.link import Link

from lock_hashes import MINORS, hashes, suits

ROOT = Path(__file__).parents[1]
LINUX = "manylinux_2_28_x86_64"
BUILT = [f"a_b-1.0-cp3{minor}-cp3{minor}-{LINUX}.whl" for minor in MINORS]


def chosen(*names: str, marker: str = "") -> list[str]:
    """The files of these whose hashes are listed for a-b==1.0, each hash being the number of its place."""
    files = [Link(f"file:///{name}#sha256={place:064x}") for place, name in enumerate(names)]
    return [names[int(sha, 16)] for sha in hashes(files, f"a-b==1.0{marker}")]


@pytest.mark.parametrize(
    ("tag", "minors"),
    [
        ("py3-none-any", (11, 12, 13)),
        ("py2.py3-none-any", (11, 12, 13)),
        (f"cp312-cp312-{LINUX}", (12,)),
        (f"cp39-abi3-{LINUX}", (11, 12, 13)),
        ("cp312-abi3-macosx_11_0_arm64", (12, 13)),
        (f"py3-none-{LINUX}", (11, 12, 13)),
        ("cp311-none-any", (11,)),
        (f"cp313-cp313t-{LINUX}", ()),
        ("cp311-cp311-win_amd64", ()),
        ("cp311-cp311-musllinux_1_2_x86_64", ()),
        ("cp311-cp311-manylinux_2_28_s390x", ()),
        ("py2-none-any", ()),
        (f"pp311-pypy311_pp73-{LINUX}", ()),
    ],
)
def test_which_pythons_a_wheel_is_for(tag, minors):
    assert tuple(minor for minor in MINORS if any(suits(each, minor) for each in parse_tag(tag))) == minors


def test_wheels_of_the_version_for_each_python_and_system_are_listed_and_no_source():
    arm = f"a_b-1.0-cp312-cp312-{LINUX.replace('x86_64', 'aarch64')}.whl"
    others = ["a_b-1.1-py3-none-any.whl", "a_b-1.0-cp310-cp310-win_amd64.whl", "a_b-1.0.tar.gz", "a_b-1.0-odd.whl"]
    assert chosen(*BUILT, arm, *others) == [*BUILT, arm]
    assert chosen(*BUILT, arm, *others, marker=' ; python_version >= "3.13"') == BUILT[2:]


def test_the_source_is_listed_where_a_python_has_no_wheel_on_linux_and_a_pin_without_either_is_refused(capsys):
    assert chosen(*BUILT[:2], "a_b-1.0.tar.gz") == [*BUILT[:2], "a_b-1.0.tar.gz"]
    assert capsys.readouterr().out == "a-b==1.0: built from its source for Python 3.13\n"
    with pytest.raises(SystemExit, match=r"error: a-b==1.0 is there for no Python 3.13 on Linux x86-64"):
        chosen(*BUILT[:2], "a_b-1.1.tar.gz")


STAND_IN = """#!{python}
import sys
if sys.argv[1] == "-m":
    sys.exit(7)
sys.version_info = {version}
print("Python", sys.version_info) if sys.argv[1] == "-V" else exec(sys.argv[2])
"""


@pytest.mark.parametrize(("version", "allowed"), [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)])
def test_an_environment_is_made_for_the_pythons_that_the_locks_are_for(tmp_path, version, allowed):
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, version=version))
    python.chmod(0o755)
    command = ["scripts/make_env.sh", str(tmp_path / "env"), "requirements/tpu.lock"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert ("the lock files are for Python 3.11 to 3.13: make PYTHON=" in done.stderr) == (not allowed)
    assert ("could not be made" in done.stderr) == allowed
