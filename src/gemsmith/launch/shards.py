"""Images that a launch carries: those that rows name, packed into a few objects, and unpacked beside the rows there.

Rows stay as they are, byte for byte, so what they name must lie below their folder:

    pets/trainval.jsonl, pets/images/sphynx_1.jpg               the row says images/sphynx_1.jpg
    launched/images/data-train/00000.tar, …, files.sha256     as they are in the bucket
    launched/inputs/data-train/images/sphynx_1.jpg              as the machine reads it, beside trainval.jsonl
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gemsmith.errors import DataError, RunError, first_line
from gemsmith.recipe.schema import Data
from gemsmith.system.files import atomic_replace_dir, regular_file, sha256_file
from gemsmith.tasks.messages import images_of

PACKED = "images"  # the folder of packed images: beside the rendered files, and below the launched recipe
LIST = "files.sha256"
SHARD_BYTES = 64 * 2**20  # a machine holds an object in memory while it fetches it, and fetches several at once


@dataclass(frozen=True, kw_only=True)
class ImageShards:
    """The files below `folder` that the rows of `key` name."""

    key: str
    folder: Path
    sums: Mapping[str, str]  # name, as seen from the folder -> SHA-256
    total_bytes: int

    @property
    def place(self) -> str:
        """What the key's folder is called, packed and unpacked."""
        return self.key.replace(".", "-")

    @property
    def list_file(self) -> str:
        """The rendered file that lists them."""
        return f"{self.place}.sha256"

    @property
    def list_text(self) -> str:
        """A line for each, in the form of sha256sum."""
        return "".join(f"{digest}  {name}\n" for name, digest in self.sums.items())


def find_images(data: Data | None, key: str, source: Path) -> ImageShards | None:
    """The images that the rows of `key`, at `source`, name by their paths; None where they name none.

    Of a folder that holds rows they are checked and not returned: it is copied with all that is in it. Raises DataError
    for unreadable rows, missing images, and those not below the rows' folder. Without `data`: rows to answer.
    """
    # Here, since it brings numpy, which a launch without rows of this machine does not need.
    from gemsmith.data.dataset import find_source_files
    from gemsmith.data.image_folder import FORMAT

    images = data is not None and data.format == FORMAT
    folder = source if source.is_dir() and not images else source.parent
    names: dict[str, str] = {}
    if images:
        names = {str(file.relative_to(folder)): str(source) for file in find_source_files(str(source), FORMAT)}
    else:
        for origin, name in _named(data, source):
            names.setdefault(name, origin)
    for name, origin in names.items():
        _refuse(name, folder, f"{key}, {origin}")
    if not names or folder == source:
        return None
    return ImageShards(
        key=key,
        folder=folder,
        sums={name: sha256_file(folder / name) for name in sorted(names)},
        total_bytes=sum((folder / name).stat().st_size for name in names),
    )


def pack(list_file: Path, folder: Path, out: Path) -> None:
    """Writes tars of the listed files, always the same bytes, and the list into `out`. DataError for changed ones."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace_dir(out) as beside:
        for number, shard in enumerate(_shards(list_file, folder)):
            with tarfile.open(beside / f"{number:05d}.tar", "w") as tar:
                for name, content in shard.items():
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
        (beside / LIST).write_bytes(list_file.read_bytes())


def unpack(packed: Path, into: Path) -> int:
    """Moves the files of such a folder into another, and counts them. Raises RunError for others than the list's."""
    try:
        for file in sorted(packed.glob("*.tar")):
            with tarfile.open(file) as tar:
                tar.extractall(into, filter="data")
            file.unlink()
        listed = [*_read_list(packed / LIST)]
        wrong = next((name for digest, name in listed if sha256_file(into / name) != digest), None)
    except (OSError, tarfile.TarError) as error:
        raise RunError(f"{packed}: is not what was packed ({first_line(error)}); launch again") from None
    if wrong is not None:
        raise RunError(f"{packed}: its {wrong} is not what was packed; launch again")
    return len(listed)


def _shards(list_file: Path, folder: Path) -> Iterator[dict[str, bytes]]:
    """The listed files, name -> content, in parts of about SHARD_BYTES."""
    shard: dict[str, bytes] = {}
    size = 0
    for digest, name in _read_list(list_file):
        _refuse(name, folder, str(list_file))
        content = (folder / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise DataError(f"{folder / name}: has changed since the launch was rendered; render it again")
        shard[name] = content
        size += len(content)
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _read_list(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        yield digest, name


def _named(data: Data | None, source: Path) -> Iterator[tuple[str, str]]:
    """Each image's path as a row has it, and where that row stands."""
    from gemsmith.data.dataset import find_source_files, read_dataset

    renamed = data is not None and not {"image", "images"}.isdisjoint(data.columns)
    if not renamed and not any(map(_may_name_images, find_source_files(str(source)))):
        return
    # Relative paths stay so; images that come as bytes go with their rows, and have no path.
    found = read_dataset(str(source), data=data, folder=Path(), keep=lambda _bytes: "", asked=data is None)
    for document in found.documents:
        yield from ((document.origin, part.path) for part in images_of(document.messages) if part.path)


def _may_name_images(file: Path) -> bool:
    """Whether any line has the word that every row with an image has; tables always may."""
    if file.suffix != ".jsonl":
        return True
    with regular_file(file).open("rb") as lines:
        return any(b'"image' in line for line in lines)


def _refuse(name: str, folder: Path, where: str) -> None:
    """Raises DataError for an image that is not named as one below the folder, or does not exist."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        allowed = f"a launch carries those below the folder of the rows, {folder}, named as seen from there"
        remedy = "put it there and name it so, or give rows with the images' bytes"
        raise DataError(f"{where}: names the image {name}; {allowed}; {remedy}")
    if not name.isprintable():
        raise DataError(f"{where}: names the image {name!r}, which no list can name; rename it")
    if not (folder / name).is_file():
        raise DataError(f"{where}: its image {folder / name} does not exist; put it there, or take the row out")
