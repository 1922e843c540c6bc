"""Where each tensor lies in a safetensors file, from its header alone; and writing such a file.

The format: 8 bytes of little-endian header length, the header as JSON, then the tensors' bytes. The safetensors library
gives neither byte ranges nor bfloat16 as numpy, which loading and merging one tensor at a time needs.
Source: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gemsmith.errors import CheckpointError
from gemsmith.system.files import regular_file, sha256_file
from gemsmith.system.json import parse_json

if TYPE_CHECKING:
    import numpy as np

FLOATS = ("BF16", "F16", "F32")
# dtype -> its name in numpy or ml_dtypes, and the bytes of a value.
_DTYPES = {
    "BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4), "F64": ("float64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "BOOL": ("bool", 1), "U8": ("uint8", 1),
    "I8": ("int8", 1), "I16": ("int16", 2), "I32": ("int32", 4), "I64": ("int64", 8),
}  # fmt: skip
# Of each dtype: the bits of a number's size, and those from which on it is infinity or NaN.
SIZE_BITS: Mapping[str, tuple[str, int, int]] = {
    "BF16": ("uint16", 0x7FFF, 0x7F80),
    "F16": ("uint16", 0x7FFF, 0x7C00),
    "F32": ("uint32", 0x7FFFFFFF, 0x7F800000),
}
_LONGEST_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 4 * 2**20
_SAMPLE_BYTES = 4096
_MOST_AXES = 8
_BLOCK_VALUES = 2**20
# In the metadata of a file that was written here: SHA-256 of its tensors.
_SHA256_KEY = "gemsmith_sha256"


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """One tensor's place: bytes `begin` to `end` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    held: "Callable[[slice], np.ndarray] | None" = None
    """Gives rows of the matrix as training held them, where that is not what the file has."""

    @property
    def matrix(self) -> tuple[int, int]:
        """Its shape as rows of the last axis; a scalar is one of one."""
        return math.prod(self.shape[:-1]), self.shape[-1] if self.shape else 1

    def rows(self, rows: slice) -> "np.ndarray":
        """Those rows of the matrix, as training held them."""
        return self._mapped().reshape(self.matrix)[rows] if self.held is None else self.held(rows)

    def read(self) -> "np.ndarray":
        """The tensor, mapped from the file, or as training held it."""
        return self._mapped() if self.held is None else self.held(slice(None)).reshape(self.shape)

    def _mapped(self) -> "np.ndarray":
        """Nothing is copied until it is used."""
        import numpy as np

        if self.begin == self.end:
            return self._typed(np.empty(0, np.uint8))
        return self._typed(np.memmap(self.file, np.uint8, mode="r", offset=self.begin, shape=(self.end - self.begin,)))

    def copy(self) -> "np.ndarray":
        """The tensor, in memory of its own: a file that is shortened meanwhile would end the process if it were mapped.

        Raises CheckpointError where the file has become shorter, OSError where it is gone.
        """
        import numpy as np

        content = np.fromfile(self.file, np.uint8, count=self.end - self.begin, offset=self.begin)
        if len(content) < self.end - self.begin:
            raise CheckpointError(f"{self.file}: ended early; it was changed while it was read")
        return self._typed(content)

    def _typed(self, content: "np.ndarray") -> "np.ndarray":
        # A view of bytes, since neither np.memmap nor np.fromfile knows bfloat16.
        return content.view(numpy_dtype(self.dtype)).reshape(self.shape)


def numpy_dtype(dtype: str) -> "np.dtype":
    """The numpy dtype of safetensors' `BF16`, `F32` and others."""
    import ml_dtypes
    import numpy as np

    name = _DTYPES[dtype][0]
    return np.dtype(getattr(ml_dtypes, name, name))


def count_nonfinite(place: TensorPlace) -> int:
    """How many values are NaN or infinity, by their bits: numpy's isfinite takes ten times as long for bfloat16."""
    import numpy as np

    unsigned, size_bits, infinity = SIZE_BITS[place.dtype]
    values = place.read().view(unsigned).reshape(-1)
    blocks = (values[begin : begin + _BLOCK_VALUES] for begin in range(0, len(values), _BLOCK_VALUES))
    return sum(int(np.count_nonzero((block & size_bits) >= infinity)) for block in blocks)


def read_header(file: Path) -> tuple[dict[str, TensorPlace], Mapping[str, str]]:
    """Every tensor's place, and the metadata. Raises CheckpointError for a missing, truncated or damaged file."""
    try:
        size_bytes = file.stat().st_size
        with regular_file(file).open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size_bytes, _LONGEST_HEADER_BYTES):
                raise CheckpointError(f"{file}: is truncated or not safetensors ({size_bytes} bytes); copy it again")
            header = parse_json(stream.read(length).decode())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: its safetensors header is damaged ({error}); copy it again") from None
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{file}: its safetensors header is damaged; copy it again")
    places = {name: _place(file, name, entry, 8 + length) for name, entry in header.items()}
    end = max((place.end for place in places.values()), default=8 + length)
    if sum(place.end - place.begin for place in places.values()) != end - 8 - length and end == size_bytes:
        why = "tensors overlap or leave gaps"
        raise CheckpointError(f"{file}: its safetensors header is damaged: {why}; copy it again")
    if end != size_bytes:
        remedy = "it is truncated or damaged, copy it again"
        raise CheckpointError(f"{file}: is {size_bytes} bytes, its header says {end}; {remedy}")
    return places, metadata


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    bytes: int
    sha256: str


def write_tensors(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: "Callable[[str], np.ndarray]",
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> WrittenFile:
    """Writes float32 tensors, one in memory at a time, with the metadata and the digest of all."""
    header: dict[str, Any] = {"__metadata__": {**metadata, _SHA256_KEY: "0" * 64}}
    end = 0
    for name in sorted(shapes):
        begin, end = end, end + 4 * math.prod(shapes[name])
        header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [begin, end]}
    content = hashlib.sha256()
    with file.open("wb") as stream:
        stream.write(_header_bytes(header))
        for name in sorted(shapes):
            value = tensor(name)
            assert value.shape == shapes[name], f"{name} is {value.shape}"
            block = value.astype("<f4", order="C", copy=False).reshape(-1).view("uint8").data
            content.update(block)
            stream.write(block)
        header["__metadata__"][_SHA256_KEY] = content.hexdigest()
        stream.seek(0)
        stream.write(_header_bytes(header))
        stream.flush()
        os.fsync(stream.fileno())
    return WrittenFile(bytes=file.stat().st_size, sha256=sha256_file(file))


def check_digest(places: Mapping[str, TensorPlace], metadata: Mapping[str, str], name: str) -> None:
    """Raises CheckpointError where the metadata's SHA-256, over all bytes in the order of names, is not that found."""
    if (written := metadata.get(_SHA256_KEY)) is None:
        return
    total = hashlib.sha256()
    for _, place in sorted(places.items()):
        with place.file.open("rb") as stream:
            stream.seek(place.begin)
            for begin in range(place.begin, place.end, _PIECE_BYTES):
                total.update(stream.read(min(_PIECE_BYTES, place.end - begin)))
    if (found := total.hexdigest()) != written:
        raise CheckpointError(f"{name} is damaged: SHA-256 {found[:12]}… instead of {written[:12]}…; copy it again")


def fingerprint(places: Mapping[str, TensorPlace]) -> str:
    """SHA-256 over names, dtypes, shapes and some bytes of each tensor, however sharded; reads 10 MB of 62 GB."""
    total = hashlib.sha256()
    for name in sorted(places):
        place = places[name]
        total.update(f"{name} {place.dtype} {list(place.shape)}\n".encode())
        with place.file.open("rb") as stream:
            last = max(place.begin, place.end - _SAMPLE_BYTES)
            for begin in sorted({place.begin, (place.begin + place.end) // 2, last}):
                stream.seek(begin)
                total.update(stream.read(min(_SAMPLE_BYTES, place.end - begin)))
    return total.hexdigest()


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _place(file: Path, name: str, entry: Any, base: int) -> TensorPlace:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        item_bytes = _DTYPES[dtype][1]
        if len(shape) > _MOST_AXES or not all(
            isinstance(one, int) and 0 <= one < 2**63 for one in (*shape, begin, end)
        ):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        remedy = "copy it again"
        raise CheckpointError(f"{file}: its entry for {name} is damaged or of an unknown dtype; {remedy}") from None
    if end - begin != (expected := math.prod(shape) * item_bytes):
        raise CheckpointError(
            f"{file}: {name} has {end - begin} bytes, its shape {list(shape)} in {dtype} needs {expected}"
        )
    return TensorPlace(file=file, dtype=dtype, shape=shape, begin=base + begin, end=base + end)
