"""Answers on disk, as a process that was killed at any moment left them."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gemsmith.evals.cache import (
    appending,
    digest_model,
    digest_question,
    keep,
    keep_server,
    log_retry,
    read_cache,
    read_retries,
    read_server,
)
from gemsmith.runs.records import ServerFacts
from gemsmith.runs.run import Run
from gemsmith.serve.client.chat import Reply
from gemsmith.tasks.messages import plain_messages, text_message

ONE, OTHER = Reply(text="eins\n\u2028é\u0000", cut=False), Reply(text="zwei", cut=True)

ADAPTER, FP8 = {"weights": "adapter"}, {"kv_cache_dtype": "fp8"}


def test_an_answer_is_on_disk_as_soon_as_it_is_kept(tmp_path: Path) -> None:
    with appending(tmp_path / "answers") as stream:
        keep(stream, "a", ONE)
        assert read_cache(tmp_path / "answers") == {"a": ONE}
        keep(stream, "b", OTHER)
    assert read_cache(tmp_path / "answers") == {"a": ONE, "b": OTHER}


def test_what_the_last_server_of_a_model_said_is_read_and_rubbish_is_left_out(tmp_path: Path) -> None:
    file, facts = tmp_path / "answers", ServerFacts(dtype="bfloat16", unread=("version",))
    with appending(file) as stream:
        keep_server(stream, "a", ServerFacts())
        keep_server(stream, "a", facts)
        keep_server(stream, "b", ServerFacts())
        stream.write(b'{"digest": "a", "server": {"dtype": 3}}\n{"digest": "a", "server": "x"}\n')
    assert read_server(file, "a") == facts and read_server(file, "c") is None and read_cache(file) == {}


def test_a_file_that_ends_anywhere_loses_one_answer_at_most_and_takes_the_next(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    with appending(file) as stream:
        keep(stream, "a", ONE)
        first = file.stat().st_size
        keep(stream, "b", OTHER)
    whole = file.read_bytes()
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        kept = read_cache(file)
        assert kept == {
            key: reply for key, reply, end in (("a", ONE, first), ("b", OTHER, len(whole))) if size >= end - 1
        }
        with appending(file) as stream:
            keep(stream, "c", OTHER)
        assert read_cache(file) == kept | {"c": OTHER}


def test_no_file_holds_no_answer(tmp_path: Path) -> None:
    assert read_cache(tmp_path / "answers") == {}


def test_questions_differ_in_roles_and_in_turns() -> None:
    user, system = text_message("user", "a"), text_message("system", "a")
    assert len({digest_question("m", messages) for messages in ([user], [system], [user, user], [system, user])}) == 4
    assert digest_question("m", [user]) != digest_question("n", [user])


def test_an_answer_is_kept_under_the_json_that_the_server_is_asked_with() -> None:
    user = text_message("user", "é")
    text = json.dumps(["m", {"role": "user", "content": "é"}], sort_keys=True)
    assert digest_question("m", [user]) == hashlib.sha256(text.encode()).hexdigest()
    assert json.dumps(plain_messages([user])) == '[{"role": "user", "content": "\\u00e9"}]'


def test_base_and_tuned_have_digests_of_their_own_however_they_are_served(
    exported_run: Callable[..., Run], fake_vllm: Callable[..., Path]
) -> None:
    """Else one model's answers would be taken for the other's."""
    fake_vllm()
    run = exported_run()
    ways = [run.recipe.serve, *(run.recipe.serve.model_copy(update=keys) for keys in (ADAPTER, FP8))]
    runs = [replace(run, recipe=run.recipe.model_copy(update={"serve": serve})) for serve in ways]
    digests = [digest_model(one, run.merged, weights, max_tokens=8) for one in runs for weights in ("base", "tuned")]
    assert len(set(digests)) == 6


def test_what_was_asked_again_is_counted_beside_the_answers_and_a_torn_line_is_none(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    assert read_retries(file) == []
    with appending(file) as stream:
        log_retry(stream, "a", "http 429")
        keep(stream, "a", Reply(text="eins", cut=False, tokens=7))
        log_retry(stream, "b", "cut off")
    assert read_cache(file) == {"a": Reply(text="eins", cut=False, tokens=7)}
    assert read_retries(file) == [("a", "http 429"), ("b", "cut off")]
    file.write_bytes(file.read_bytes()[:-5])
    assert read_retries(file) == [("a", "http 429")]


def test_samples_of_one_question_are_kept_apart_by_how_they_are_drawn() -> None:
    user = text_message("user", "a")
    drawn = [{"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in (1, 2)] + [{"temperature": 0.7, "seed": 1}]
    assert len({digest_question("m", [user], drawn=one) for one in (*drawn, None)}) == 4
