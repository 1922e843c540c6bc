"""Answers on disk, as a process that was killed at any moment left them."""

import hashlib
import json
from pathlib import Path

from gemsmith.evals.kept import appending, digest_question, keep, read_kept
from gemsmith.messages import plain_messages, text_message
from gemsmith.serve.chat import Reply

ONE, OTHER = Reply(text="eins\n\u2028é\u0000", cut=False), Reply(text="zwei", cut=True)


def test_an_answer_is_on_disk_as_soon_as_it_is_kept(tmp_path: Path) -> None:
    with appending(tmp_path / "answers") as stream:
        keep(stream, "a", ONE)
        assert read_kept(tmp_path / "answers") == {"a": ONE}
        keep(stream, "b", OTHER)
    assert read_kept(tmp_path / "answers") == {"a": ONE, "b": OTHER}


def test_a_file_that_ends_anywhere_loses_one_answer_at_most_and_takes_the_next(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    with appending(file) as stream:
        keep(stream, "a", ONE)
        first = file.stat().st_size
        keep(stream, "b", OTHER)
    whole = file.read_bytes()
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        kept = read_kept(file)
        assert kept == {
            key: reply for key, reply, end in (("a", ONE, first), ("b", OTHER, len(whole))) if size >= end - 1
        }
        with appending(file) as stream:
            keep(stream, "c", OTHER)
        assert read_kept(file) == kept | {"c": OTHER}


def test_no_file_holds_no_answer(tmp_path: Path) -> None:
    assert read_kept(tmp_path / "answers") == {}


def test_questions_differ_in_roles_and_in_turns() -> None:
    user, system = text_message("user", "a"), text_message("system", "a")
    assert len({digest_question("m", messages) for messages in ([user], [system], [user, user], [system, user])}) == 4
    assert digest_question("m", [user]) != digest_question("n", [user])


def test_an_answer_is_kept_under_the_json_that_the_server_is_asked_with() -> None:
    user = text_message("user", "é")
    text = json.dumps(["m", {"role": "user", "content": "é"}], sort_keys=True)
    assert digest_question("m", [user]) == hashlib.sha256(text.encode()).hexdigest()
    assert json.dumps(plain_messages([user])) == '[{"role": "user", "content": "\\u00e9"}]'
