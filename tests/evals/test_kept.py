"""Answers on disk, as a process that was killed at any moment left them."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from gemsmith.evals.cache import AnswerCache, digest_model, digest_question
from gemsmith.runs.records import ServerFacts
from gemsmith.runs.run import Run
from gemsmith.serve.client.chat import Reply
from gemsmith.tasks.messages import plain_messages, text_message

ONE, OTHER = Reply(text="eins\n\u2028é\u0000", cut=False), Reply(text="zwei", cut=True)

ADAPTER, FP8 = {"weights": "adapter"}, {"kv_cache_dtype": "fp8"}


def test_an_answer_is_on_disk_as_soon_as_it_is_kept(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "answers")
    cache.add("a", **asdict(ONE))
    assert AnswerCache(tmp_path / "answers").replies() == {"a": ONE}
    cache.add("b", **asdict(OTHER))
    assert AnswerCache(tmp_path / "answers").replies() == {"a": ONE, "b": OTHER}


def test_answers_of_several_files_are_read_and_the_last_file_is_written(tmp_path: Path) -> None:
    done, now = tmp_path / "done", tmp_path / "now"
    AnswerCache(done).add("a", **asdict(ONE))
    cache = AnswerCache(done, now)
    cache.add("b", **asdict(OTHER))
    assert cache.replies() == {"a": ONE, "b": OTHER} and AnswerCache(now).replies() == {"b": OTHER}


def test_what_the_last_server_of_a_model_said_is_read_and_rubbish_is_left_out(tmp_path: Path) -> None:
    file, facts = tmp_path / "answers", ServerFacts(dtype="bfloat16", unread=("version",))
    cache = AnswerCache(file)
    cache.add("a", server=ServerFacts().model_dump())
    cache.add("a", server=facts.model_dump())
    cache.add("b", server=ServerFacts().model_dump())
    with file.open("ab") as stream:
        stream.write(b'{"digest": "a", "server": {"dtype": 3}}\n{"digest": "a", "server": "x"}\n')
    assert cache.server("a") == facts and cache.server("c") is None and cache.replies() == {}


def test_a_file_that_ends_anywhere_loses_one_answer_at_most_and_takes_the_next(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    cache = AnswerCache(file)
    cache.add("a", **asdict(ONE))
    first = file.stat().st_size
    cache.add("b", **asdict(OTHER))
    whole = file.read_bytes()
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        kept = cache.replies()
        assert kept == {
            key: reply for key, reply, end in (("a", ONE, first), ("b", OTHER, len(whole))) if size >= end - 1
        }
        cache.add("c", **asdict(OTHER))
        assert cache.replies() == kept | {"c": OTHER}


def test_no_file_holds_no_answer(tmp_path: Path) -> None:
    assert AnswerCache(tmp_path / "answers").replies() == {}


def test_questions_differ_in_roles_and_in_turns() -> None:
    user, system = text_message("user", "a"), text_message("system", "a")
    assert len({digest_question("m", messages) for messages in ([user], [system], [user, user], [system, user])}) == 4
    assert digest_question("m", [user]) != digest_question("n", [user])
    assert digest_question("m", [user]) != digest_question("m", [user], tools=[{"function": {"name": "f"}}])


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
    digests = [digest_model(one, run.merged, weights, 8) for one in runs for weights in ("base", "tuned")]
    assert len(set(digests)) == 6


def test_what_was_asked_again_is_counted_beside_the_answers_and_a_torn_line_is_none(tmp_path: Path) -> None:
    file, keys = tmp_path / "answers", {"a", "b"}
    cache = AnswerCache(file)
    assert cache.count_retries(keys) == {}
    cache.add("a", retried="http 429")
    cache.add("a", text="eins", cut=False, tokens=7)
    cache.add("b", retried="cut off")
    assert cache.replies() == {"a": Reply(text="eins", cut=False, tokens=7)}
    assert cache.count_retries(keys) == {"cut off": 1, "http 429": 1} and cache.count_retries({"b"}) == {"cut off": 1}
    file.write_bytes(file.read_bytes()[:-5])
    assert cache.count_retries(keys) == {"http 429": 1}


def test_samples_of_one_question_are_kept_apart_by_how_they_are_drawn() -> None:
    user = text_message("user", "a")
    drawn = [{"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in (1, 2)] + [{"temperature": 0.7, "seed": 1}]
    assert len({digest_question("m", [user], drawn=one) for one in (*drawn, None)}) == 4
