"""What this machine remembers of a launch: launches/NAME/launch.json, beside the files that were submitted."""

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from gemsmith.errors import InputError, nearest
from gemsmith.files import write_text
from gemsmith.records import SCHEMA_VERSION, Part

LAUNCHES = Path("launches")


class LaunchRecord(Part):
    """A launch: where it went, and all that status, logs, fetch, stop and clean need to find it again."""

    schema_version: int = SCHEMA_VERSION
    name: str
    state: Literal["submitting", "submitted", "failed", "cleaned"]
    """`submitting` and `failed`: some of it may be there."""
    target: str
    machine: str
    project: str
    region: str
    zone: str | None
    cluster: str | None = None
    root: str
    """gs://bucket/folder/NAME."""
    stages: tuple[str, ...]
    image: str | None
    """None where uv's Python is used in place of one."""
    secret: str | None
    service_account: str
    spot: bool
    usd_per_hour: float
    greatest_usd: float
    started: str
    """UTC, ISO 8601."""
    gemsmith: str
    files: dict[str, str]
    """Rendered file -> SHA-256."""


def launch_folder(name: str) -> Path:
    return LAUNCHES / name


def write_launch(record: LaunchRecord) -> None:
    """Writes the record whole or not at all."""
    folder = launch_folder(record.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "launch.json", record.model_dump_json(indent=1) + "\n")


def read_launch(name: str) -> LaunchRecord:
    """The record of a launch. Raises InputError with the names that there are, or for one that is damaged."""
    file = launch_folder(name) / "launch.json"
    try:
        return LaunchRecord.model_validate_json(file.read_bytes())
    except OSError:
        names = known_launches()
        there = f"there are: {', '.join(names)}" if names else "there are none in this folder"
        raise InputError(f"launch {name}: {file} is not there{nearest(name, names)}; {there}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(
            f"{file}: is not a launch's record of this version ({'.'.join(map(str, first['loc']))}: {first['msg']}); "
            "open it with the Gemsmith that wrote it"
        ) from None


def known_launches() -> list[str]:
    return sorted(file.parent.name for file in LAUNCHES.glob("*/launch.json"))
