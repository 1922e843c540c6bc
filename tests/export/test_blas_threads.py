"""OpenBLAS computes with one thread inside the block, and with as many as before afterwards."""

import numpy as np
import pytest

from gemsmith.export import merge
from gemsmith.export.merge import one_blas_thread


class Library:
    """A stand-in for a loaded BLAS that remembers its number of merge."""

    def __init__(self, count: int) -> None:
        self.count = count

    def put(self, count: int) -> None:
        self.count = count


@pytest.fixture
def libraries(monkeypatch):
    found = [Library(4), Library(7)]
    monkeypatch.setattr(merge, "_openblas", lambda: ((lambda one=one: one.count, one.put) for one in found))
    return found


def test_every_library_has_one_thread_inside_and_its_own_number_afterwards(libraries):
    with one_blas_thread():
        assert [library.count for library in libraries] == [1, 1]
    assert [library.count for library in libraries] == [4, 7]


def test_the_number_comes_back_after_an_error_too(libraries):
    with pytest.raises(ZeroDivisionError), one_blas_thread():
        raise ZeroDivisionError
    assert [library.count for library in libraries] == [4, 7]


def test_where_no_maps_tell_what_is_loaded_nothing_is_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(merge, "Path", lambda _: tmp_path / "no-such-file")
    assert list(merge._openblas()) == []


def test_the_openblas_of_numpys_own_wheels_is_found():
    if "openblas" not in np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]:
        pytest.skip("this numpy has another BLAS")
    if not merge.Path("/proc/self/maps").exists():
        pytest.skip("no /proc here")
    assert all(get() >= 1 for get, _ in merge._openblas()) and list(merge._openblas())
    with one_blas_thread():
        assert {get() for get, _ in merge._openblas()} == {1}
