import json

import pytest

from gemsmith.errors import MachineError
from gemsmith.launch.bucket import Bucket, files_below


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
