"""Datasets of the hub, against a stand-in of its API on this machine."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pyarrow.parquet
import pytest

from gemsmith.data.dataset import read_dataset, source_sha256
from gemsmith.data.prepare import codev, oxford_pets
from gemsmith.data.reader import find_files
from gemsmith.errors import DataError
from gemsmith.runs.resolve import resolve_file
from gemsmith.system.files import sha256_file
from gemsmith.system.storage import Bucket

COMMIT, OTHER = "a" * 40, "b" * 40
ROW = {"prompt": "a", "response": "b"}


@dataclass
class Hub:
    name: str = "me/rows"
    files: dict[str, bytes] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    """Files of which the first answer ends after half."""
    ranges: list[str | None] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    told = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            path = self.path.partition("?")[0]
            told.asked.append(path)
            told.tokens.add(self.headers.get("Authorization"))
            api, files = f"/api/datasets/{told.name}", f"/datasets/{told.name}/resolve/{COMMIT}/"
            content: bytes | None = None
            if path in (api, f"{api}/revision/v1"):
                content = json.dumps({"id": "me/rows", "sha": COMMIT}).encode()
            elif path == f"{api}/tree/{COMMIT}":
                sizes = {name: len(data) for name, data in told.files.items()}
                entries = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
                content = json.dumps(entries).encode()
            elif path.startswith(files):
                content = told.files[path.removeprefix(files)]
            begin = int((self.headers.get("Range") or "=0-").partition("=")[2].partition("-")[0])
            self.send_response(404 if content is None else 206 if begin else 200)
            if begin and content is not None:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
                content = content[begin:]
            self.send_header("ETag", f'"{hashlib.sha256(path.encode()).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if self.command == "HEAD":
                return
            told.ranges += [self.headers.get("Range")] if path.startswith(files) else []
            if path.removeprefix(files) in told.cut:
                told.cut.remove(path.removeprefix(files))
                content, self.close_connection = (content or b"")[: len(content or b"") // 2], True
            self.wfile.write(content or b"")

        do_GET = do_HEAD = do  # noqa: N815 - as BaseHTTPRequestHandler looks them up

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    from huggingface_hub import constants

    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    yield told
    server.shutdown()
    server.server_close()


def lines(count: int) -> bytes:
    return "".join(json.dumps(ROW) + "\n" for _ in range(count)).encode()


def test_a_split_is_fetched_once_and_read_whole(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 3), tmp_path / "rows.parquet")
    shard = (tmp_path / "rows.parquet").read_bytes()
    train = {f"data/train-0000{part}-of-00002.parquet": shard for part in (0, 1)}
    hub.files = {"README.md": b"", "data/test-00000-of-00001.parquet": shard, "dataset_info.json": b"{}"} | train
    source = f"hub:me/rows@{COMMIT}"
    assert len(read_dataset(source).documents) == 6
    assert {path for path in hub.asked if "resolve" in path and "test" in path} == set()
    assert "Bearer hf_ours" in hub.tokens
    before = len(hub.asked)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert [file.name for file in find_files(f"{source}:train")] == [name.removeprefix("data/") for name in train]
    assert len(hub.asked) == before
    with pytest.raises(DataError, match=rf"^{source}:test: could not be fetched .*HF_TOKEN"):
        find_files(f"{source}:test")


def test_a_name_without_its_commit_is_told_the_one_of_today(hub: Hub) -> None:
    with pytest.raises(DataError, match=rf"names no commit.* write hub:me/rows@{COMMIT}:test, .* main holds now$"):
        find_files("hub:me/rows:test")


@pytest.mark.parametrize(
    ("files", "split", "said"),
    [
        ({"test.jsonl": b""}, "train", "the dataset has no such split"),
        ({"main/train.jsonl": b"", "socratic/train.jsonl": b""}, "train", "in main, socratic; name the folder before"),
        ({"train.jsonl": b"", "train.parquet": b""}, "train", "is several sets of files"),
        (
            {"train.jsonl": b"", "train-small.jsonl": b""},
            "train",
            "is several files, .*; name one of them, such as :tra",
        ),
        ({"train-00000-of-00002.jsonl": b""}, "train", "1 of its 2 files are here"),
    ],
)
def test_a_split_that_is_not_one_set_of_files_is_refused(hub: Hub, files: dict, split: str, said: str) -> None:
    hub.files = files
    with pytest.raises(DataError, match=said):
        find_files(f"hub:me/rows@{COMMIT}:{split}")


def test_a_folder_or_a_file_of_the_dataset_is_named_as_the_split(hub: Hub) -> None:
    hub.files = {"main/train.jsonl": lines(2), "socratic/train.jsonl": lines(3), "main/test/a.csv": b"x"}
    hub.files |= {"all/part/de.jsonl": b"", "all/part/en.jsonl": b""}
    for split, count in (("socratic/train", 3), ("main/train.jsonl", 2)):
        assert len(read_dataset(f"hub:me/rows@{COMMIT}:{split}").documents) == count
    assert [file.name for file in find_files(f"hub:me/rows@{COMMIT}:test")] == ["a.csv"]
    assert [file.name for file in find_files(f"hub:me/rows@{COMMIT}:all/part")] == ["de.jsonl", "en.jsonl"]


def test_what_is_not_there_and_what_is_no_name_are_one_line(hub: Hub) -> None:
    for source, said in (
        (f"hub:me/rows@{OTHER}", "could not be fetched"),
        ("hub:me/other", "could not be fetched"),
        ("hub:rows", "is no dataset of the hub; write hub:user/name@commit:split"),
    ):
        with pytest.raises(DataError, match=rf"^{source}: {said}") as error:
            find_files(source)
        assert "\n" not in str(error.value)


def test_a_recipe_keeps_the_name_as_it_is(tiny_checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": f"hub:me/rows@{COMMIT}", "eval": "5%", "max_length": 128}
    (tmp_path / "my.yaml").write_text(json.dumps({"checkpoint": str(tiny_checkpoint("tiny-31b")), "data": data}))
    monkeypatch.chdir(tmp_path)
    recipe = resolve_file(Path("my.yaml"))[0]
    assert recipe.data.train == recipe.data.eval == data["train"] and recipe.data.held_out == 0.05


def test_codev_is_fetched_by_name_resumed_and_its_commit_told(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gemsmith: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 20)
    row = {"prompt": "Give 1.", "response": "<think>a</think>module a; endmodule"}
    hub.name, hub.files, hub.cut = codev.HUB_ID, {codev.FILE: (json.dumps(row) + "\n").encode() * 40}, {codev.FILE}
    source, out = f"hub:{codev.HUB_ID}@{COMMIT}:{codev.FILE}", tmp_path / "rows.jsonl"
    code, printed, err = gemsmith("prepare", "codev", "--out", out, "--json")
    record = json.loads(printed)
    assert (code, record["source"], record["rows_written"]) == (0, source, 40), err
    assert record["source_sha256"] == source_sha256(source) and record["out_sha256"] == sha256_file(out)
    assert hub.ranges == [None, f"bytes={len(hub.files[codev.FILE]) // 2}-"] and hub.tokens == {"Bearer hf_ours"}
    # That commit is here now; which one main is cannot be known without the hub.
    before = len(hub.asked)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = gemsmith("prepare", "codev", "--out", out, "--revision", COMMIT)
    assert code == 0 and f"40 of 40 rows of {source} written to" in " ".join(err.split()) and len(hub.asked) == before
    code, _, err = gemsmith("prepare", "codev", "--out", tmp_path / "other.jsonl")
    assert code == 2 and err.startswith(f"error: hub:{codev.HUB_ID}: could not be fetched") and err.count("\n") == 1
    code, _, err = gemsmith("prepare", "codev", out, "--revision", COMMIT, "--out", tmp_path / "other.jsonl")
    assert code == 2 and "does not go with" in err and not (tmp_path / "other.jsonl").exists()


def pets(tmp_path: Path, *, named: bool = True, label: int = 1) -> bytes:
    """A table as `datasets` writes it, with two images."""
    said = {"info": {"features": {"label": {"names": ["abyssinian", "beagle"], "_type": "ClassLabel"}}}}
    rows = [
        {"image": {"bytes": b"one", "path": "a"}, "label": 0},
        {"image": {"bytes": b"two", "path": "b"}, "label": 1},
    ]
    table = pyarrow.Table.from_pylist([*rows[:1], rows[1] | {"label": label}])
    if named:
        table = table.replace_schema_metadata({"huggingface": json.dumps(said)})
    pyarrow.parquet.write_table(table, tmp_path / "pets.parquet")
    return (tmp_path / "pets.parquet").read_bytes()


def test_oxford_pets_are_fetched_by_name_with_their_images_beside_the_rows(hub: Hub, tmp_path: Path) -> None:
    hub.name, hub.files = oxford_pets.HUB_ID, {"data/train-00000-of-00001.parquet": pets(tmp_path)}
    hub.files["data/test-00000-of-00001.parquet"] = hub.files["data/train-00000-of-00001.parquet"]
    for split, called in (("trainval", "train"), ("test", "test")):
        out = tmp_path / "pets" / f"{split}.jsonl"
        record = oxford_pets.prepare_oxford_pets(None, out, split=split, revision="v1")
        assert (record.source, record.rows_written) == (f"hub:{oxford_pets.HUB_ID}@{COMMIT}:{called}", 2)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [((out.parent / row["image"]).read_bytes(), row["response"]) for row in rows] == [
            (b"one", "abyssinian"),
            (b"two", "beagle"),
        ]
        assert all("this list: abyssinian, beagle. Answer" in row["prompt"] for row in rows)
        assert [row.get("labels") for row in rows] == [["abyssinian", "beagle"] if split == "test" else None] * 2
    assert hub.asked.count(f"/api/datasets/{hub.name}/revision/v1") == 2
    with pytest.raises(DataError, match=r"test_images: already exists, and is where the images go; delete it"):
        oxford_pets.prepare_oxford_pets(None, out, split="test", revision=COMMIT)


@pytest.mark.parametrize(
    ("table", "said"),
    [({"named": False}, "does not say which breed a label is"), ({"label": 2}, "row 2 has no image and label as")],
)
def test_pets_of_another_form_are_one_line_and_nothing_is_written(
    hub: Hub, tmp_path: Path, table: dict[str, Any], said: str
) -> None:
    hub.name, hub.files = oxford_pets.HUB_ID, {"train.parquet": pets(tmp_path, **table)}
    with pytest.raises(DataError, match=said) as error:
        oxford_pets.prepare_oxford_pets(None, tmp_path / "new" / "rows.jsonl", split="trainval", revision=None)
    assert "\n" not in str(error.value) and not list((tmp_path / "new").glob("*"))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A web of two files, one of them cut short; returns the addresses that were asked for."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        if request.url.path == "/old.jsonl":
            return httpx.Response(302, headers={"Location": "https://host/rows.jsonl"})
        if request.url.path == "/cut.jsonl":
            raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")
        return httpx.Response(200, content=lines(3)) if request.url.path == "/rows.jsonl" else httpx.Response(404)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr("httpx.stream", client.stream)
    monkeypatch.setenv("GEMSMITH_CACHE", str(tmp_path / "kept"))
    return asked


def test_a_file_at_an_address_is_fetched_once_and_its_hash_is_that_of_its_content(
    served: list[str], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(3))
    for source in ("https://host/rows.jsonl?token=x", "https://host/old.jsonl"):
        assert len(read_dataset(source).documents) == len(read_dataset(source).documents) == 3
        assert source_sha256(source) == source_sha256(str(tmp_path / "rows.jsonl"))
    assert len(served) == 3  # one of them was sent on
    with pytest.raises(DataError, match=r"^https://host/other.jsonl: could not be fetched \(.*404.*\); check it"):
        find_files("https://host/other.jsonl")
    with pytest.raises(DataError, match=r"^https://host/cut.jsonl: could not be fetched \(peer closed"):
        find_files("https://host/cut.jsonl")
    for source in ("http://host/rows.jsonl", "s3://bucket/rows.jsonl"):
        with pytest.raises(DataError, match=rf"^{source}: cannot be fetched; allowed: https:// or gs:// and the name"):
            find_files(source)
    for source in ("https://host/rows.txt", "https://host/"):
        with pytest.raises(
            DataError, match=rf"^{source}: (is a .txt file|has a name without a suffix); allowed: \.jsonl"
        ):
            find_files(source)
    assert not list((tmp_path / "kept").rglob(".*"))


def test_a_file_in_a_bucket_is_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEMSMITH_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr("gemsmith.data.hub.Bucket", lambda url: Bucket(url.replace("gs://", f"file://{tmp_path}/")))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rows.jsonl").write_bytes(lines(2))
    assert len(read_dataset("gs://b/rows.jsonl").documents) == 2
    (tmp_path / "b" / "rows.jsonl").unlink()
    assert len(read_dataset("gs://b/rows.jsonl").documents) == 2
    with pytest.raises(DataError, match=r"^gs://b/other.jsonl: could not be fetched"):
        find_files("gs://b/other.jsonl")
