import hashlib
from pathlib import Path

import pytest

from gemsmith.errors import MachineError
from gemsmith.images.decode import keep_bytes, prune_cache


def test_bytes_are_kept_once_under_their_sha256(tmp_path):
    one, again, other = (keep_bytes(tmp_path / "images", data) for data in (b"a", b"a", b"b"))
    assert one == again != other and Path(one).read_bytes() == b"a"
    assert Path(one).name == hashlib.sha256(b"a").hexdigest()


def test_what_no_row_needs_is_deleted(tmp_path):
    folder = tmp_path / "images"
    one, other = (Path(keep_bytes(folder, data)) for data in (b"a", b"b"))
    prune_cache(folder, {one.name})
    assert one.exists() and not other.exists()
    prune_cache(folder, set())
    assert not folder.exists()
    prune_cache(folder, set())


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "images").write_text("a file")
    with pytest.raises(MachineError, match=r"images: an image cannot be written there"):
        keep_bytes(tmp_path / "images", b"a")
