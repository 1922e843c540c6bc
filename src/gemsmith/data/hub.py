"""Rows that are elsewhere: hub:user/name@commit:split in the hub client's cache, a file at an address in ours."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from gemsmith.errors import DataError, MachineError, RunError, first_line
from gemsmith.system.files import expanduser, partial_path
from gemsmith.system.storage import Bucket

PREFIX = "hub:"
_FORM = re.compile(r"hub:(?P<name>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<split>[\w./-]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")


def name_split(name: str, split: str, revision: str | None = None) -> str:
    """The address of a dataset's split at the commit that a revision, by default main, is now; a commit is itself.

    Raises DataError where the hub cannot be reached or has no such dataset.
    """
    import huggingface_hub

    if not _COMMIT.fullmatch(revision or ""):
        with _hub_errors(f"{PREFIX}{name}" + ("" if revision is None else f"@{revision}")):
            revision = huggingface_hub.HfApi().dataset_info(name, revision=revision).sha
    return f"{PREFIX}{name}@{revision}:{split}"


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """Raises DataError for what goes wrong between here and the hub."""
    import httpx

    try:
        yield
    except (httpx.HTTPError, OSError, ValueError) as error:
        what = f"could not be fetched from the Hugging Face hub ({first_line(error)})"
        remedy = (
            "check the name and the commit, accept the dataset's terms and set HF_TOKEN, or name files that are here"
        )
        raise DataError(f"{source}: {what}; {remedy}") from None


def fetch_file(url: str) -> Path:
    """The file at an address, https:// or gs://, streamed into the cache once. Raises DataError without one."""
    import httpx

    from gemsmith.system.console import open_console

    scheme, _, rest = url.partition("://")
    name = rest.partition("?")[0].rpartition("/")[2]
    if scheme not in ("https", "gs"):
        raise DataError(f"{url}: cannot be fetched; allowed: https:// or gs:// and the name of a file, or files here")
    cache = expanduser(os.environ.get("GEMSMITH_CACHE", "~/.cache/gemsmith"))
    target = cache / "rows" / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    if target.exists():
        return target
    partial = partial_path(target)
    open_console().print(f"data: fetching {url} into {target.parent}")
    try:
        if scheme == "gs":
            Bucket(url.removesuffix(f"/{name}")).download(name, target)
            return target
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file, httpx.stream("GET", url, follow_redirects=True, timeout=60) as response:
            response.raise_for_status()
            for piece in response.iter_bytes():
                file.write(piece)
        partial.replace(target)
    except (httpx.HTTPError, OSError, MachineError, RunError) as error:
        partial.unlink(missing_ok=True)
        why = error if isinstance(error, MachineError) else first_line(error)  # its own words, or a library's
        raise DataError(f"{url}: could not be fetched ({why}); check it, or name a file here") from None
    return target


def fetch_split(source: str) -> tuple[Path, ...]:
    """All files of a split, `train` where none is named: train.jsonl, train-00000-of-00002.parquet, data/train/….

    A split may be a path, with the folder that it is in. Only a commit is fetched: a run resumes on the same rows.
    Raises DataError where the source is of another form, names no commit, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    found = _FORM.fullmatch(source)
    if found is None:
        raise DataError(f"{source}: is no dataset of the hub; write hub:user/name@commit:split, such as …:train")
    name, revision, split = found["name"], found["revision"], found["split"] or "train"
    patterns = [f"{folder}{split}{rest}" for folder in ("", "*/") for rest in ("", ".*", "-*", "/*")]
    if not _COMMIT.fullmatch(revision or ""):
        remedy = f"write {name_split(name, split, revision)}, which is what {revision or 'main'} holds now"
        raise DataError(f"{source}: names no commit, so its rows may change; {remedy}")
    with _hub_errors(source):
        folder = snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns)
    names = {file: file.relative_to(folder).as_posix() for file in sorted(Path(folder).rglob("*")) if file.is_file()}
    return tuple(file for file, name in names.items() if any(fnmatch(name, pattern) for pattern in patterns))
