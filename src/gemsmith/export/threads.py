"""One thread for each product of numpy, so that several products can be computed at once."""

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# numpy's own wheels carry OpenBLAS with names of its functions like these.
_NAMES = (
    "scipy_openblas_{}_num_threads64_",
    "scipy_openblas_{}_num_threads",
    "openblas_{}_num_threads64_",
    "openblas_{}_num_threads",
)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """OpenBLAS computes with one thread, and with as many as before afterwards; another BLAS is left as it is.

    OpenBLAS lets one caller in at a time while it has several threads, and those that wait for work keep a core busy.
    """
    found = [(get(), put) for get, put in _openblas()]
    for _, put in found:
        put(1)
    try:
        yield
    finally:
        for threads, put in found:
            put(threads)


def _openblas() -> Iterator[tuple[Any, Any]]:
    """Getter and setter of the number of threads, of each OpenBLAS that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for path in sorted(set(re.findall(r"/\S*openblas\S*\.so\S*", maps))):
        library = ctypes.CDLL(path)
        for name in _NAMES:
            getter, setter = (getattr(library, name.format(word), None) for word in ("get", "set"))
            if getter and setter:
                yield getter, setter
                break
