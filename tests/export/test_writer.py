import errno
import hashlib
import os

import numpy as np
import pytest

from gemsmith.export import writer as writer_module
from gemsmith.export.writer import FileWriter

_SIZES = (0, 1, 4096, 4097, 3 * 4096 - 1, 70_000)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(writer_module, "_CHUNK_BYTES", 2 * 4096)


def write(folder, sizes=_SIZES, piece=1000):
    """Files of random bytes, appended a piece at a time: their contents by name, and what the writer says of them."""
    random, contents = np.random.default_rng(0), {}
    with FileWriter() as writer:
        for size in sizes:
            contents[f"{size}"] = random.bytes(size)
            writer.begin(folder / f"{size}")
            for begin in range(0, size, piece):
                writer.append(np.frombuffer(contents[f"{size}"][begin : begin + piece], np.uint8))
            writer.end()
        return contents, writer.sums()


@pytest.mark.parametrize("piece", [1000, 4096, 100_000])
def test_files_of_any_size_hold_what_was_appended(tmp_path, small_chunks, piece):
    contents, sums = write(tmp_path, piece=piece)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents
    assert [(each.name, each.bytes, each.sha256) for each in sums] == [
        (name, len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
    ]


@pytest.mark.parametrize("refused", ["the flag", "the write"])
def test_a_file_system_without_direct_writes_is_written_through_its_cache(tmp_path, small_chunks, monkeypatch, refused):
    direct, fcntl, pwrite = [], writer_module.fcntl.fcntl, os.pwrite

    def refuse_flag(descriptor, command, *arguments):
        if arguments and arguments[0] & os.O_DIRECT:
            direct.append(arguments)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fcntl(descriptor, command, *arguments)

    def refuse_write(descriptor, *arguments):
        if fcntl(descriptor, writer_module.fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(arguments)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, *arguments)

    if refused == "the flag":
        monkeypatch.setattr(writer_module.fcntl, "fcntl", refuse_flag)
    else:
        monkeypatch.setattr(os, "pwrite", refuse_write)
    contents, _ = write(tmp_path)
    assert direct
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents


@pytest.mark.parametrize("size", [1, 70_000])
def test_a_write_that_fails_is_told(tmp_path, small_chunks, monkeypatch, size):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, sizes=(size,))


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "1").write_text("old")
    with pytest.raises(FileExistsError):
        write(tmp_path, sizes=(1,))
    assert (tmp_path / "1").read_text() == "old"
