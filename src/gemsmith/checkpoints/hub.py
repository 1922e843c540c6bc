"""The local folder of a checkpoint that is named as a folder, a Hugging Face hub id or gs://bucket/folder."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from gemsmith.arch import HUB_ID
from gemsmith.errors import CheckpointError, MachineError, first_line
from gemsmith.system.files import expanduser
from gemsmith.system.storage import Bucket

_WEIGHTS = "*.safetensors"
_WANTED = ("*.json", "*.jinja", "*.model", "LICENSE*", "NOTICE*", "README.md")


def fetch_folder(source: str, *, weights: bool = True) -> Path:
    """Downloads first where the source is elsewhere. Raises CheckpointError where nothing is there or reached."""
    check_source(source)
    wanted = (*_WANTED, *([_WEIGHTS] if weights else []))
    if "://" in source:
        return _fetch_bucket(source, wanted)
    folder = expanduser(source)
    return folder if folder.is_dir() else _fetch_hub(source, wanted)


def check_source(source: str) -> None:
    """Raises CheckpointError for what is neither a folder that is there nor an address to fetch. Fetches nothing."""
    check_scheme(source)
    if "://" not in source and not expanduser(source).is_dir() and not is_hub_id(source):
        raise CheckpointError(
            f"checkpoint {source!r}: is not a folder, a Hugging Face hub id (owner/name) or gs://bucket/folder"
        )


def is_hub_id(source: str) -> bool:
    """Whether the source has the form owner/name and is no local folder."""
    return bool(HUB_ID.fullmatch(source)) and not expanduser(source).exists()


def check_scheme(source: str) -> None:
    """Raises CheckpointError for an address of a kind that cannot be fetched."""
    scheme, mark, _ = source.partition("://")
    if mark and scheme not in ("gs", "file"):
        remedy = "allowed: gs://bucket/folder, a hub id, a folder"
        raise CheckpointError(f"checkpoint {source}: {scheme}:// is not known; {remedy}")


def _fetch_hub(hub_id: str, patterns: Sequence[str]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {hub_id}: is no folder here and could not be downloaded from the Hugging Face hub "
            f"({first_line(error)}); check the name, accept the model's license and set HF_TOKEN, or give a folder"
        ) from None


def _fetch_bucket(url: str, patterns: Sequence[str]) -> Path:
    """Copies the files of a bucket's folder into the cache, but those whose version is there."""
    cache = expanduser(os.environ.get("GEMSMITH_CACHE", "~/.cache/gemsmith"))
    folder = cache / "checkpoints" / hashlib.sha256(url.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        bucket = Bucket(url)
        names = [name for name in bucket.names() if "/" not in name]
        wanted = [name for name in names if any(Path(name).match(pattern) for pattern in patterns)]
        for name in wanted:
            target, mark, generation = folder / name, folder / f".{name}.generation", bucket.generation(name)
            if not (target.exists() and mark.exists() and mark.read_text() == generation):
                bucket.download(name, target)
                mark.write_text(generation)
    except (MachineError, OSError) as error:
        raise CheckpointError(f"checkpoint {url}: cannot be read: {error}") from None
    if "config.json" not in wanted:
        raise CheckpointError(f"checkpoint {url}: holds no config.json; give the folder of a Hugging Face checkpoint")
    return folder
