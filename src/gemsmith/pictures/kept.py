"""Pictures that came as bytes, each in a file of its own that has its SHA-256 for a name."""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from gemsmith.errors import MachineError


def keep_bytes(folder: Path, data: bytes) -> str:
    """The path of the file that holds these bytes in the folder. Raises MachineError where it cannot be written."""
    file = folder / hashlib.sha256(data).hexdigest()
    try:
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f".{file.name}.{os.getpid()}")
            beside.write_bytes(data)
            beside.replace(file)
    except OSError as error:
        raise MachineError(f"{folder}: a picture cannot be written there ({error.strerror or error})") from None
    return str(file.absolute())


def drop_others(folder: Path, names: Collection[str]) -> None:
    """Deletes the files in the folder that have none of these names, and the folder where none is left."""
    if not folder.is_dir():
        return
    for file in [*folder.iterdir()]:
        if file.name not in names:
            file.unlink()
    if not names:
        folder.rmdir()
