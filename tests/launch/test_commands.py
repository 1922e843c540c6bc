import pytest

from gemsmith.errors import EngineError, InputError, MachineError
from gemsmith.launch.commands import _table, fill, find_complaint
from gemsmith.launch.submit import ask, show


def test_a_program_that_is_not_there_is_an_answer_with_a_complaint():
    answer = ask(("no-such-program-here", "x"))
    assert answer.returncode == 127 and answer.stderr == "no-such-program-here is not on PATH"


@pytest.mark.parametrize("name", ["a b", "a;id", "a$(id)", "a'b", 'a"b'])
def test_a_record_puts_no_more_than_a_word_into_a_script(name):
    with pytest.raises(InputError, match=r"name .*must be letters"):
        fill("bash -c 'sky jobs queue | grep {name}'", {"name": name})
    assert fill("sky jobs logs --name {name}", {"name": name})[-1] == name


def test_an_answer_has_the_output_and_the_last_line_of_stderr():
    answer = ask(("bash", "-c", "echo out; echo one >&2; echo two >&2; exit 3"))
    assert (answer.returncode, answer.stdout, answer.stderr) == (3, "out\n", "two")


def test_a_script_stops_at_the_first_failure(tmp_path):
    script = tmp_path / "submit.sh"
    script.write_text(f"set -e\nfalse\ntouch {tmp_path}/late\n")
    with pytest.raises(EngineError, match=r"submit\.sh ended with 1"):
        show(("bash", str(script)))
    assert not (tmp_path / "late").exists()


def test_a_missing_program_is_told_before_anything_runs(tmp_path):
    with pytest.raises(MachineError, match="no-such-program-here: is not on PATH"):
        show(("bash", str(tmp_path / "x.sh")), needs=("no-such-program-here",))
    with pytest.raises(MachineError, match="no-such-program-here"):
        show(("no-such-program-here",))


def test_each_check_before_a_launch_is_of_a_kind_that_is_known():
    kinds = {entry.get("complaint", "empty") for entry in _table()["preflight"]}
    assert len(kinds) > 5
    values = dict.fromkeys(("apis", "member", "name", "region", "role", "service_account"), "x")
    for kind in kinds:
        find_complaint(kind, values, "")
    with pytest.raises(AssertionError, match="complaint emtpy"):
        find_complaint("emtpy", values, "")
