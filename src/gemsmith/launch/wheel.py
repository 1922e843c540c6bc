"""A folder with Gemsmith's wheel and its locks: what uv installs on a machine where no container image is used."""

from pathlib import Path

from gemsmith.errors import InputError
from gemsmith.launch.target import Command
from gemsmith.version import __version__

LOCKS = ("train.lock", "tpu.lock", "gcs.lock")
PLACE = "python"
"""Where its files are, below the run's folder in the bucket."""
WHEEL = f"gemsmith-{__version__}-py3-none-any.whl"
_MAKE = "make build/python in Gemsmith's sources makes such a folder"


def check_wheel(folder: Path) -> None:
    """Raises InputError unless the folder has the wheel of this version, no other wheel, and the locks."""
    if not folder.is_dir():
        raise InputError(f"--python {folder}: is no folder; {_MAKE}")
    wheels = sorted(path.name for path in folder.glob("*.whl"))
    if wheels != [WHEEL]:
        found = f"has {', '.join(wheels)}" if wheels else "has no wheel"
        raise InputError(f"--python {folder}: {found}; it must have {WHEEL} alone; {_MAKE}")
    if missing := [name for name in LOCKS if not (folder / name).is_file()]:
        raise InputError(f"--python {folder}: has no {missing[0]}; {_MAKE}")


def upload_wheel(folder: Path, root: str) -> tuple[str, Command]:
    """Reason and command of the copy to the bucket."""
    files = [str(folder / name) for name in (WHEEL, *LOCKS)]
    return "Gemsmith's wheel and its locks, which uv installs there.", (
        *("gcloud", "storage", "cp", *files),
        f"{root}/{PLACE}/",
    )
