import json
import os
import socket
from types import SimpleNamespace

import pytest

from gemsmith.errors import MachineError
from gemsmith.system.storage import Bucket, files_below


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "store").mkdir()
    return Bucket(f"file://{tmp_path}/store")


def test_objects_are_written_listed_read_and_deleted(bucket):
    for name in ("run/b", "run/a", "runs", "other"):
        bucket.write(name, name.encode())
    assert bucket.names("run/") == ["run/a", "run/b"] and len(bucket.names()) == 4
    assert bucket.read("run/a") == b"run/a" and bucket.read("gone") is None
    bucket.delete("run/a")
    bucket.delete("gone")
    assert bucket.names("run/") == ["run/b"]


def test_files_go_up_and_come_down_as_they_were(bucket, tmp_path):
    header = json.dumps({"x": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + b"12345"
    for name, content in {"a.safetensors": weights, "b.json": b"{}", "empty": b""}.items():
        (tmp_path / name).write_bytes(content)
        bucket.upload(tmp_path / name, f"deep/{name}")
        bucket.download(f"deep/{name}", tmp_path / "home" / name)
        assert (tmp_path / "home" / name).read_bytes() == content
    assert [name for name, _ in files_below(tmp_path / "home")] == ["a.safetensors", "b.json", "empty"]


def test_hidden_files_of_a_run_stay_where_they_are(tmp_path):
    for name in (".lock", "a/.b", "a/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [name for name, _ in files_below(tmp_path)] == ["a/c"]
    assert len(list(files_below(tmp_path, hidden=True))) == 3


def test_an_address_that_is_none_is_one_line():
    with pytest.raises(MachineError, match=r"^nowhere://x: cannot be reached") as error:
        Bucket("nowhere://x")
    assert "\n" not in str(error.value)


class Cut:
    """A store whose first answers were cut within their head, as tensorstore gives them on."""

    def __init__(self, store, answers):
        self._store, self._answers, self.asked = store, answers, 0

    def read(self, name, **options):
        self.asked += 1
        return self._next() if self._answers else self._store.read(name, **options)

    def write(self, name, content):
        self.asked += 1
        return self._next() if self._answers else self._store.write(name, content)

    def _next(self):
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(result=lambda: answer)


EMPTY = SimpleNamespace(state="value", value=b"")


def test_an_empty_answer_is_asked_for_again_before_it_is_believed(bucket):
    bucket.write("a", b"whole")
    bucket._store = Cut(bucket._store, [EMPTY, EMPTY])
    assert bucket.read("a") == b"whole"
    bucket._store = Cut(bucket._store, [EMPTY] * 3)
    assert bucket.read("a") == b""


def test_an_answer_that_cannot_be_read_is_asked_for_again(bucket, monkeypatch):
    monkeypatch.setattr("gemsmith.system.storage._PAUSES_S", (0.0,) * 2)
    broken = ValueError("Failed to parse object metadata: ")
    bucket._store = cut = Cut(bucket._store, [broken, broken])
    bucket.write("a", b"whole")
    assert bucket.read("a") == b"whole" and cut.asked == 4
    bucket._store = Cut(bucket._store, [broken] * 3)
    with pytest.raises(MachineError, match="cannot be reached"):
        bucket.write("a", b"")


def test_what_is_refused_is_not_asked_for_again(bucket):
    denied = ValueError("PERMISSION_DENIED: no")
    bucket._store = cut = Cut(bucket._store, [denied])
    with pytest.raises(MachineError, match="PERMISSION_DENIED"):
        bucket.write("a", b"")
    assert cut.asked == 1


def test_an_answer_is_not_waited_for_without_end(monkeypatch, tmp_path):
    """tests/fake_cloud/test_bucket.py has a bucket that does not answer, and a shorter bound."""
    monkeypatch.setenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "")
    monkeypatch.delenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS")
    Bucket(f"file://{tmp_path}")
    assert os.environ["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] == "60"


def test_a_store_out_of_reach_is_asked_a_bounded_number_of_times(monkeypatch):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    monkeypatch.setattr("gemsmith.system.storage._RETRIES", {"max_retries": 1, "initial_delay": "10ms"})
    with pytest.raises(MachineError, match=r"^gs://bucket/folder: cannot be reached \(ABORTED: All 1 retry attempts"):
        Bucket("gs://bucket/folder").names()


def test_without_a_network_a_bucket_is_told_at_once_and_tried_again_first(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    asked, pauses = [], []

    def resolve(*host):
        asked.append(host)
        if len(asked) < answers_at:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    monkeypatch.setattr("time.sleep", pauses.append)
    answers_at = 9
    with pytest.raises(
        MachineError, match=r"^gs://bucket/folder: cannot be reached: no address .* \(Temporary failure"
    ):
        Bucket("gs://bucket/folder")
    assert len(asked) == 3 and sum(pauses) == 3
    asked, answers_at = [], 3
    Bucket("gs://bucket/folder")
    assert len(asked) == 3
