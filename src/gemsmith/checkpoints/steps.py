"""Whether a saved step is still what training saved.

    Orbax             checkpoints/<step>/_CHECKPOINT_METADATA  model_params/  optimizer_state/
    the TRL backend   checkpoints/<step>/training.json  adapter_config.json  adapter_model.safetensors
                                         moments.safetensors
                                         (model.safetensors instead of the adapter where train.method is full)

Either has metadata: what training says of the step, `checksums` of what lies beside it, and the `sha256` of all that.
Those of files are SHA-256; those of tensors can be computed where a tensor's parts are, split over devices and hosts:

    mixed = mix(bits, place)    sums modulo 2**32 over all places: mixed, and mixed · (2 place + 1)

For a given place, mix is a bijection of the bits and 2 place + 1 is odd, so one value that has changed always changes
both sums. As its place goes in, so do values that have changed places. Sums of integers do not depend on their order,
hence not on the mesh.
"""

import inspect
import itertools
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gemsmith.checkpoints.peft import WEIGHTS, some
from gemsmith.checkpoints.peft_config import CONFIG
from gemsmith.errors import CorruptCheckpointError, first_line
from gemsmith.system.files import sha256_file, sha256_json
from gemsmith.system.signals import heard_later

ResultT = TypeVar("ResultT")

# Said by what is still under way once a read or save has failed, and its event loop is closed, or the interpreter ends.
LEFT_OVER = ("Event loop is closed", "cannot schedule new futures after")
ORBAX, TRAINING, TRAINED = "_CHECKPOINT_METADATA", "training.json", "model.safetensors"
_CHECKSUMS, _SHA256 = "checksums", "sha256"


def checkpoint_steps(checkpoints: Path) -> list[int]:
    """The steps that training saved, in order, also damaged ones, but none whose saving was interrupted."""
    if not checkpoints.is_dir():
        return []
    folders = [folder for folder in checkpoints.iterdir() if folder.name.isdecimal() and folder.is_dir()]
    return sorted(int(folder.name) for folder in folders if is_peft_step(folder) or _is_committed(folder))


def is_peft_step(folder: Path) -> bool:
    """Whether the TRL backend saved the step. It gives a folder its number once all of it is on disk."""
    return any((folder / name).is_file() for name in (TRAINING, CONFIG, WEIGHTS))


def _is_committed(folder: Path) -> bool:
    """Orbax marks the end of a save in two files, so that neither's damage makes a step look unfinished."""
    if (folder / "commit_success.txt").is_file():
        return True
    try:
        return bool(read_json(folder / ORBAX)["commit_timestamp_nsecs"])
    except (CorruptCheckpointError, KeyError, TypeError):
        return False


def set_aside(folder: Path, *, writes: bool) -> str:
    """The name that the process which `writes` gives the folder of a damaged step: one that is no step's."""
    names = (folder.with_name(f"{folder.name}.damaged{number or ''}") for number in itertools.count())
    aside = next(name for name in names if not name.exists())
    if writes:
        folder.rename(aside)
    return aside.name


def add_checksum(metadata: Mapping[str, Any], checksums: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata with the checksums of what is saved beside it, and the SHA-256 of both."""
    content = json.loads(json.dumps({**metadata, _CHECKSUMS: checksums}))
    return {**content, _SHA256: sha256_json(content)}


def verify_checksum(sealed: Any) -> dict[str, Any]:
    """What `add_checksum` was given, or all metadata where nothing was. Raises CorruptCheckpointError."""
    if not isinstance(sealed, dict):
        raise CorruptCheckpointError("its metadata is damaged")
    content = {key: value for key, value in sealed.items() if key != _SHA256}
    # Either key shows that the step was sealed, so that damage to the other does not hide it.
    if (_CHECKSUMS in sealed or _SHA256 in sealed) and sealed.get(_SHA256) != sha256_json(content):
        raise CorruptCheckpointError("its metadata is not what was saved")
    return content


def read_step_metadata(folder: Path) -> dict[str, Any]:
    """What training said of the step; empty where another program saved it. Raises CorruptCheckpointError."""
    if is_peft_step(folder):
        return verify_checksum(read_json(folder / TRAINING))
    whole = read_json(folder / ORBAX)
    if not isinstance(whole, dict) or "custom_metadata" not in whole:
        raise CorruptCheckpointError(f"its {ORBAX} is damaged")
    return verify_checksum(whole["custom_metadata"] or {})


def compare_checksums(metadata: Mapping[str, Any], item: str, found: Mapping[str, str]) -> None:
    """Raises CorruptCheckpointError where an item's tensors are not those saved; another program says no checksums."""
    if _CHECKSUMS not in metadata:
        return
    saved: Mapping[str, str] = metadata[_CHECKSUMS].get(item, {})
    if changed := sorted(name for name in saved.keys() | found.keys() if saved.get(name) != found.get(name)):
        verb = "is" if len(changed) == 1 else "are"
        raise CorruptCheckpointError(f"{some(changed, most=3)} in {item} {verb} not what was saved")


def check_files(folder: Path, metadata: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises CorruptCheckpointError where one of these files of a step is gone or not what was saved."""
    for name in names:
        try:
            found = sha256_file(folder / name)
        except OSError as error:
            raise CorruptCheckpointError(_unreadable(folder / name, error)) from None
        if _CHECKSUMS in metadata and metadata[_CHECKSUMS].get(name) != found:
            raise CorruptCheckpointError(f"{name} is not what was saved")


def read_json(file: Path) -> Any:
    """Raises CorruptCheckpointError where the file is gone, or no JSON."""
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise CorruptCheckpointError(_unreadable(file, error)) from None
    except (ValueError, RecursionError):
        raise CorruptCheckpointError(f"its {file.name} is damaged") from None


def read_or_damage(read: Callable[[], ResultT], *, but: type[Exception] = MemoryError) -> ResultT:
    """What `read` returns; CorruptCheckpointError where Orbax trips over a damaged file with any error but `but`."""
    drop_leftovers()
    # Once a read has failed it stays off: asyncio logs what becomes of each of the others, which Orbax abandons.
    log = logging.getLogger("asyncio")
    before, log.disabled = log.disabled, True
    try:
        with heard_later():
            result = read()
    except (MemoryError, but):
        log.disabled = before
        raise
    except Exception as error:  # noqa: BLE001
        reason = first_line(error, otherwise="no reason given")
        raise CorruptCheckpointError(f"Orbax cannot read it, {type(error).__name__}: {reason}") from None
    log.disabled = before
    return result


def drop_leftovers() -> None:
    """Has Python print nothing of reads and writes that were under way when one failed: they have no caller to tell."""
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _print_unless_left_over:
        sys.unraisablehook = partial(_print_unless_left_over, sys.unraisablehook)


def _print_unless_left_over(before: Callable[[Any], object], swallowed: Any) -> None:
    if not (inspect.iscoroutine(swallowed.object) or any(words in str(swallowed.exc_value) for words in LEFT_OVER)):
        before(swallowed)


def _unreadable(file: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"its {file.name} is missing"
    return f"its {file.name} cannot be read: {error.strerror or error}"


# The finalizer of MurmurHash3: https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp
_FACTORS = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_SHIFTS = np.uint32(16), np.uint32(13), np.uint32(16)
_OF_PLACE = np.uint32(0x9E3779B1)
# Temporaries of these stay in a core's cache.
_VALUES_AT_ONCE = 2**16


def mix(bits: Any, place: Any) -> Any:
    """Both uint32, arrays of numpy or of JAX."""
    mixed = bits ^ (place * _OF_PLACE)
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _FACTORS[1]
    return mixed ^ (mixed >> _SHIFTS[2])


def weigh(mixed: Any, place: Any) -> Any:
    return mixed * (place * np.uint32(2) + np.uint32(1))


def write_checksum(dtype: Any, shape: Sequence[int], sums: Sequence[int]) -> str:
    """The checksum as it is saved, such as `float32[2,384,16] 0c8ae1f09b22d7e4`."""
    first, second = (int(total) % 2**32 for total in sums)
    return f"{dtype}[{','.join(map(str, shape))}] {first:08x}{second:08x}"


def checksum(array: np.ndarray) -> str:
    """The checksum of an array of numpy, of 1, 2 or 4 bytes a value."""
    words = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    first = second = 0
    for begin in range(0, len(words), _VALUES_AT_ONCE):
        bits = words[begin : begin + _VALUES_AT_ONCE].astype(np.uint32)
        place = np.arange(begin, begin + len(bits), dtype=np.uint64).astype(np.uint32)
        mixed = mix(bits, place)
        first += int(mixed.sum(dtype=np.uint64))
        second += int(weigh(mixed, place).sum(dtype=np.uint64))
    return write_checksum(array.dtype, array.shape, (first, second))
