"""Where each tensor lies in a safetensors file, from its header alone.

The format: 8 bytes of little-endian header length, the header as JSON, then the tensors' bytes. The safetensors library reads
tensors, but gives neither their byte ranges nor bfloat16 as numpy; both are needed to load and merge one tensor at a time.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemsmith.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

_ITEM_BYTES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
_NUMPY = {"F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"}
_NUMPY |= {"BOOL": "bool", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_LONGEST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """One tensor's place: bytes `begin` to `end` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> "np.ndarray":
        """The tensor, mapped from the file; nothing is copied until it is used."""
        import ml_dtypes
        import numpy as np

        name = _NUMPY[self.dtype]
        dtype = np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
        if self.begin == self.end:
            return np.empty(self.shape, dtype)
        # A private map of the bytes, then a view: np.memmap does not know bfloat16.
        return np.memmap(self.file, np.uint8, mode="r", offset=self.begin, shape=(self.end - self.begin,)).view(dtype).reshape(self.shape)


def read_header(file: Path) -> tuple[dict[str, TensorPlace], Mapping[str, str]]:
    """Every tensor's place, and the file's metadata.

    Raises CheckpointError where the file is missing, truncated, or not safetensors.
    """
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size_bytes, _LONGEST_HEADER_BYTES):
                raise CheckpointError(f"{file}: is truncated or not safetensors ({size_bytes} bytes); copy it again")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise CheckpointError(f"{file}: its safetensors header is damaged; copy it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its safetensors header is damaged; copy it again")
    metadata = header.pop("__metadata__", {})
    places = {name: _place(file, name, entry, 8 + length) for name, entry in header.items()}
    end = max((place.end for place in places.values()), default=8 + length)
    if end != size_bytes:
        raise CheckpointError(f"{file}: is {size_bytes} bytes, its header says {end}; it is truncated or damaged, copy it again")
    return places, metadata


def _place(file: Path, name: str, entry: Any, base: int) -> TensorPlace:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        expected = math.prod(shape) * _ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file}: its entry for {name} is damaged or of an unknown dtype; copy it again") from None
    if end - begin != expected:
        raise CheckpointError(f"{file}: {name} has {end - begin} bytes, its shape {list(shape)} in {dtype} needs {expected}")
    return TensorPlace(file=file, dtype=dtype, shape=shape, begin=base + begin, end=base + end)
