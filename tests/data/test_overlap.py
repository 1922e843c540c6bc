import numpy as np
import pytest

from gemsmith.data.dataset import Document
from gemsmith.data.dedup import find_overlap, hash_turns, overlap_notices, read_answers, write_answers
from gemsmith.errors import RunError
from gemsmith.tasks.messages import text_message

ROLES = {"s": "system", "u": "user", "a": "assistant"}


def document(*turns: str, origin: str = "rows.jsonl line 1") -> Document:
    """A document of turns such as "u:hello"."""
    return Document(messages=tuple(text_message(ROLES[turn[0]], turn[2:]) for turn in turns), origin=origin)


def hashes(documents: list[Document]) -> np.ndarray:
    return np.frombuffer(b"".join(map(hash_turns, documents)), np.uint64).reshape(-1, 2)


def overlap(trained: list[Document], *held_out: Document):
    counts = find_overlap(hashes(trained), held_out).counts
    return counts.same_prompt, counts.same_answer


@pytest.mark.parametrize(("held_out", "expected"), [
    (("u:say one", "a:1"), (1, 1)),
    (("u:  say\n\tone ", "a:1\n"), (1, 1)),
    (("u:say one", "a:2"), (1, 0)),
    (("u:Say one", "a:1"), (0, 0)),
    (("u:sayone", "a:1"), (0, 0)),
    (("s:be brief", "u:say one", "a:1"), (0, 0)),
    (("s:say one", "a:1"), (0, 0)),
])  # fmt: skip
def test_a_prompt_is_the_same_but_for_white_space(held_out, expected):
    assert overlap([document("u:other", "a:1"), document("u:say one", "a:1")], document(*held_out)) == expected


def test_every_answer_of_a_conversation_is_trained_on_and_the_last_is_asked_for():
    chat_loop = document("u:one", "a:1", "u:two", "a:2")
    assert overlap([chat_loop], document("u:one", "a:1")) == (1, 1)
    assert overlap([chat_loop], document("u:one", "a:1", "u:two", "a:other")) == (1, 0)
    assert overlap([chat_loop], document("u:two", "a:2")) == (0, 0)
    assert overlap([document("u:one", "a:1")], chat_loop) == (0, 0)


def test_where_one_message_ends_counts():
    assert overlap([document("u:one two", "a:1")], document("u:one", "u:two", "a:1")) == (0, 0)
    assert overlap([document("u:one\x1e user\x1ftwo", "a:1")], document("u:one", "u:two", "a:1")) == (0, 0)


def test_the_notice_counts_and_names_the_first_rows():
    trained = hashes([document("u:one", "a:1")])
    rows = [document("u:one", f"a:{line % 4}", origin=f"held.jsonl line {line}") for line in range(1, 6)]
    (notice,) = overlap_notices(find_overlap(trained, [*rows, document("u:new", "a:1")]))
    assert (
        "5 of 6 (held.jsonl line 1, held.jsonl line 2, held.jsonl line 3, …), 2 of them with the same answer" in notice
    )
    assert overlap_notices(find_overlap(trained, [document("u:new", "a:1")])) == ()
    assert "is not known" in overlap_notices(None)[0]


def test_hashes_come_back_from_the_file_as_they_were(tmp_path):
    assert read_answers(tmp_path) is None
    written = write_answers(
        tmp_path, map(hash_turns, [document("u:one", "a:1", "u:two", "a:2"), document("u:three", "a:3")])
    )
    assert written.shape == (3, 2)
    assert np.array_equal(read_answers(tmp_path), written)


@pytest.mark.parametrize("content", [b"", b"no array", None])
def test_a_damaged_file_of_hashes_is_an_error_that_names_it(tmp_path, content):
    if content is None:
        np.save(tmp_path / "answers.npy", np.zeros(3))
    else:
        (tmp_path / "answers.npy").write_bytes(content)
    with pytest.raises(RunError, match=r"answers.npy: is damaged; .* delete it"):
        read_answers(tmp_path)
