"""Parts of the rows, answered on machines of their own and joined, are what one machine writes."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemsmith.errors import InputError, RunError
from gemsmith.evals.predict import join_shards, predict_url, read_shard
from gemsmith.runs.eval_records import PredictRecord, Shard
from gemsmith.serve.client import batch
from gemsmith.serve.client.stream import SamplingParams
from support.hostile_server import Hostile, chat

GREEDY = SamplingParams(max_tokens=8)


@pytest.fixture
def shards(hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Path]]:
    """Returns the files of rows that were answered in so many parts; what the row "bad" asks fails."""
    monkeypatch.setattr(batch, "WAITS_S", (0.01,))

    def deed(asked: dict[str, Any]) -> Any:
        text = asked["messages"][-1]["content"]
        return (400, b"bad") if text == "bad" else chat(f"<{text}\u2028>", usage={"completion_tokens": 3})

    hostile.deed = deed

    def make(of: int, texts: list[str], sampling: SamplingParams = GREEDY) -> list[Path]:
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        files = [tmp_path / f"{number}-of-{of}.jsonl" for number in range(1, of + 1)]
        for number, file in enumerate(files, start=1):
            shard = Shard(number=number, of=of) if of > 1 else None
            predict_url(hostile.url, rows, file, sampling=sampling, shard=shard, force=True)
        return files

    return make


TEXTS = [*map(str, range(6)), "bad", "7", "8", "9"]


def test_joined_shards_are_what_one_command_writes(
    shards: Callable[..., list[Path]], hostile: Hostile, tmp_path: Path, gemsmith: Callable[..., Any]
) -> None:
    (whole,) = shards(1, TEXTS)
    hostile.asked.clear()
    files = shards(3, TEXTS)
    assert len(hostile.asked) == 10 and [len(file.read_bytes().splitlines()) for file in files] == [3, 3, 4]
    code, _, err = gemsmith("predict", "--join", *reversed(files), "--out", tmp_path / "out.jsonl")
    assert code == 0 and "9 of 10 rows answered (1 http 400)" in err
    assert "shard 3/3: rows without an answer: 1 of 4 (1 http 400)" in err
    assert (tmp_path / "out.jsonl").read_bytes() == whole.read_bytes()
    one, joined = (
        PredictRecord.model_validate_json((tmp_path / f"{name}.jsonl.record.json").read_text())
        for name in ("1-of-1", "out")
    )
    for key in ("rows", "failed", "cut", "asked", "asked_tokens", "rows_sha256", "model", "sampling", "shard"):
        assert getattr(joined, key) == getattr(one, key), key


def test_what_is_not_all_shards_of_one_command_is_one_line_and_writes_nothing(
    shards: Callable[..., list[Path]], tmp_path: Path, gemsmith: Callable[..., Any]
) -> None:
    (whole,), halves, thirds, out = shards(1, TEXTS[:4]), shards(2, TEXTS[:4]), shards(3, TEXTS[:4]), tmp_path / "out"
    cases = [
        (halves[:1], "--join: of 2 shards there is no 2; give the file of each"),
        ([*halves, halves[0]], "--join: shard 1/2 was given twice; leave one out"),
        ([halves[0], thirds[1]], f"--join {thirds[1]}: is one of 3 shards, {halves[0]} one of 2"),
        ([whole], f"--join {whole}: is no shard: predict wrote it without --shard; leave it out"),
    ]
    for files, told in cases:
        with pytest.raises(InputError) as error:
            join_shards(files, out)
        assert str(error.value) == told
    halves[1].write_text(halves[1].read_text().partition("\n")[0] + "\n")
    with pytest.raises(InputError, match="has 1 lines, its record says 2; run predict for that shard"):
        join_shards(halves, out)
    with pytest.raises(InputError, match=r"must be a file of its own"):
        join_shards(halves, halves[0])
    halves[1].with_name(f"{halves[1].name}.record.json").unlink()
    with pytest.raises(RunError, match=r"record\.json: does not exist; run gemsmith predict for that shard"):
        join_shards(halves, out)
    other = shards(2, TEXTS[:4], SamplingParams(max_tokens=9))[1]
    other.rename(tmp_path / "other")
    other.with_name(f"{other.name}.record.json").rename(tmp_path / "other.record.json")
    with pytest.raises(InputError, match="its sampling is not that of"):
        join_shards([shards(2, TEXTS[:4])[0], tmp_path / "other"], out)
    halves = shards(2, TEXTS[:4])
    record = halves[1].with_name(f"{halves[1].name}.record.json")
    record.write_text(re.sub('"weights_sha256": ".', '"weights_sha256": "-', record.read_text()))
    with pytest.raises(InputError, match="its weights_sha256 is not that of"):
        join_shards(halves, out)
    assert not out.exists()
    code, _, err = gemsmith("predict", "--join", "a", "--shard", "1/2", "--out", out)
    assert code == 2 and "error: --shard: does not go with --join" in err


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_a_shard_that_cannot_be_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match=f"^--shard {text}: must be I/N, with I from 1 to N, such as 1/4$"):
        read_shard(text)


def test_more_shards_than_rows_are_refused_and_all_others_miss_no_row(
    shards: Callable[..., list[Path]], hostile: Hostile
) -> None:
    with pytest.raises(InputError, match=r"^--shard 1/3: .*rows.jsonl has 2 rows; take no more shards than that$"):
        shards(3, TEXTS[:2])
    assert not hostile.asked
    for rows in range(1, 9):
        for of in range(1, rows + 1):
            parts = [list(range(rows))[Shard(number=number, of=of).slice(rows)] for number in range(1, of + 1)]
            assert [row for part in parts for row in part] == list(range(rows)) and {len(part) for part in parts} <= {
                rows // of,
                -(-rows // of),
            }
