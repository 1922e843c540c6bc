"""Checkpoints from where they live to a local folder: a folder as it is, a Hugging Face hub id, gs://."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemsmith.errors import CheckpointError, first_line

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PIECE_BYTES = 64 * 2**20
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "LICENSE*", "NOTICE*", "README.md")


def fetch_folder(source: str) -> Path:
    """The local folder that holds the checkpoint, downloaded first where the source is elsewhere.

    Raises CheckpointError where there is nothing, or it cannot be reached.
    """
    check_source(source)
    if "://" in source:
        return _fetch_bucket(source)
    folder = Path(source).expanduser()
    return folder if folder.is_dir() else _fetch_hub(source)


def check_source(source: str) -> None:
    """Raises CheckpointError for what is neither a folder that is there nor an address to fetch. Fetches nothing."""
    check_scheme(source)
    if "://" not in source and not Path(source).expanduser().is_dir() and not is_hub_id(source):
        raise CheckpointError(
            f"checkpoint {source!r}: is not a folder, a Hugging Face hub id (owner/name) or gs://bucket/folder"
        )


def is_hub_id(source: str) -> bool:
    """Whether the source has the form owner/name and is no local folder."""
    return bool(_HUB_ID.fullmatch(source)) and not source.startswith(".") and not Path(source).expanduser().exists()


def check_scheme(source: str) -> None:
    """Raises CheckpointError for an address of a kind that cannot be fetched."""
    scheme, mark, _ = source.partition("://")
    if mark and scheme not in ("gs", "file"):
        raise CheckpointError(
            f"checkpoint {source}: {scheme}:// is not known; allowed: gs://bucket/folder, a hub id, a folder"
        )


def _fetch_hub(hub_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_WANTED)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {hub_id}: is no folder here and could not be downloaded from the Hugging Face hub "
            f"({first_line(error)}); check the name, accept the model's licence and set HF_TOKEN, or give a folder"
        ) from None


def _fetch_bucket(url: str) -> Path:
    """Copies a bucket's folder into the cache; a file that is there in full is not copied again.

    tensorstore reads gs:// with the machine's own credentials, and file:// in the same way.
    """
    import tensorstore

    cache = Path(os.environ.get("GEMSMITH_CACHE", "~/.cache/gemsmith")).expanduser()
    folder = cache / "checkpoints" / hashlib.sha256(url.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        store = tensorstore.KvStore.open(url.rstrip("/") + "/").result()
        names = [key.decode() for key in store.list().result()]
        wanted = [name for name in names if "/" not in name and any(Path(name).match(pattern) for pattern in _WANTED)]
        for name in wanted:
            _copy_key(store, name, folder / name)
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"checkpoint {url}: cannot be read ({first_line(error)}); check the address and your credentials"
        ) from None
    if "config.json" not in wanted:
        raise CheckpointError(f"checkpoint {url}: holds no config.json; give the folder of a Hugging Face checkpoint")
    return folder


def _copy_key(store: Any, name: str, target: Path) -> None:
    """Copies one file piece by piece, and notes the version that was copied."""
    mark = target.with_name(f".{target.name}.generation")
    generation = store.read(name, byte_range=slice(0, 1)).result().stamp.generation.hex()
    if target.exists() and mark.exists() and mark.read_text() == generation:
        return
    partial = target.with_name(f".{target.name}.partial")
    with partial.open("wb") as file:
        for begin, end in byte_ranges(store, name):
            file.write(store.read(name, byte_range=slice(begin, end)).result().value)
    partial.replace(target)
    mark.write_text(generation)


def byte_ranges(store: Any, name: str) -> Iterator[tuple[int, int | None]]:
    """Byte ranges that cover a file: one for small files; several for weights, whose header tells how long they are.

    tensorstore has no call for a file's size, and refuses a range beyond its end.
    """
    if not name.endswith(".safetensors"):
        yield 0, None
        return
    header_bytes = int.from_bytes(store.read(name, byte_range=slice(0, 8)).result().value, "little")
    header = json.loads(store.read(name, byte_range=slice(8, 8 + header_bytes)).result().value)
    end = 8 + header_bytes + max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    yield from ((begin, min(begin + _PIECE_BYTES, end)) for begin in range(0, end, _PIECE_BYTES))
