"""A launched run brought home from its bucket."""

from pathlib import Path

from gemsmith.bucket import Bucket, files_below
from gemsmith.errors import RunError
from gemsmith.launch.mirror import RECORDS, RUN, fetch_run

_LARGE = ("merged", "data")
"""Folders that can be made again, and that nothing at home needs at first."""


def fetch_home(root: str, path: Path, *, merged: bool) -> int:
    """Copies the run from the bucket into a run directory; returns how many files it has then.

    Raises RunError where the bucket has none, or the directory holds something else.
    """
    bucket = _opened(root, path)
    fetch_run(bucket, path, without=() if merged else _LARGE)
    return sum(1 for _ in files_below(path))


def fetch_records(root: str, path: Path) -> None:
    """Copies the recipe and the records alone, which is all that a report needs."""
    bucket = _opened(root, path)
    there = bucket.names(RUN)
    for name in ("recipe.yaml", *RECORDS):
        if f"{RUN}{name}" in there:
            bucket.download(RUN + name, path / name)


def _opened(root: str, path: Path) -> Bucket:
    bucket = Bucket(root)
    if bucket.read(f"{RUN}recipe.yaml") is None:
        raise RunError(
            f"{bucket.url}: holds no run yet ({RUN}recipe.yaml is not there); see how it is doing: "
            "gemsmith launch status NAME"
        )
    if path.exists() and not (path / "recipe.yaml").exists() and any(files_below(path)):
        raise RunError(f"run directory {path}: is not empty and holds no recipe.yaml; name another with --run")
    return bucket
