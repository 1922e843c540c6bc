"""Images of a run's rows: looked at before rows are rendered, written beside the arrays, decoded ahead of a step."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace

from gemsmith.data.batches import Batches
from gemsmith.data.dataset import Dataset
from gemsmith.data.documents import Document
from gemsmith.data.packing import Rows
from gemsmith.errors import DataError
from gemsmith.images.check import ImageInfo
from gemsmith.images.decode import InvalidImageError
from gemsmith.images.patches import PatchConfig, Patches
from gemsmith.images.workers import check_images, count_processes, decode_ahead
from gemsmith.system.console import open_console, track
from gemsmith.tasks.messages import images_of

_NAMED = 3


def validate_images(dataset: Dataset, patching: PatchConfig, *, bad: str, key: str) -> Dataset:
    """The rows with what was found of their images, each of which is decoded once; `key` is that of the rows.

    Where one cannot be used its row is left out, or, where `bad` is "error", a DataError is raised.
    """
    sources = list(dict.fromkeys(part.source for row in dataset.documents for part in images_of(row.messages)))
    if not sources:
        return dataset
    found = check_images(sources, patching, processes=count_processes(len(sources)))
    images = dict(zip(track(sources, "decoding images", open_console(soft_wrap=False)), found, strict=True))
    kept, faults = [], []
    for document in dataset.documents:
        seen = [images[part.source] for part in images_of(document.messages)]
        fault = next((one for one in seen if isinstance(one, InvalidImageError)), None)
        if fault is None:
            kept.append(replace(document, images=tuple(one for one in seen if isinstance(one, ImageInfo))))
            continue
        if bad == "error":
            name = images_of(document.messages)[seen.index(fault)].path or f"its image {seen.index(fault) + 1}"
            other = {"data.train": "take the row out, or set data.on_bad_image to drop"}.get(key, "or take the row out")
            raise DataError(f"{key}, {document.origin}: {name} {fault.line}; mend it, {other}")
        faults.append((document, fault))
    if not kept:
        document, fault = faults[0]
        what = f"each of its {len(faults)} rows has an image that cannot be used"
        raise DataError(f"{key}: {what} (the first, {document.origin}: {fault.line}), so none is left")
    dropped = Counter(f"image {fault.reason}" for _, fault in faults)
    warnings = (*dataset.warnings, *_notices(kept, faults, patching, key))
    return replace(dataset, documents=kept, dropped={**dataset.dropped, **dropped}, warnings=warnings)


def decode_batches(
    batches: Batches, steps: Iterable[int], patching: PatchConfig, *, processes: int, rows: Sequence[int] | None = None
) -> Generator[tuple[Rows, list[list[Patches]]]]:
    """The batch of each step with the patches of each row's images, decoded in processes while earlier steps run.

    The processes end with the last batch, or once the generator is closed.
    """
    batched = (batches.batch(step, rows) for step in steps)
    counted = ((batch, [image for seen in batch.images for image in seen]) for batch in batched)
    for batch, patches in decode_ahead(counted, patching, processes=processes):
        left = iter(patches)
        yield batch, [[next(left) for _ in seen] for seen in batch.images] or [[] for _ in range(len(batch))]


def _notices(
    kept: Sequence[Document], faults: Sequence[tuple[Document, InvalidImageError]], patching: PatchConfig, key: str
) -> Iterator[str]:
    seen = {image.path or image.sha256: image for row in kept for image in row.images}.values()
    if faults:
        named = ", ".join(f"{row.origin}: {fault.line}" for row, fault in faults[:_NAMED])
        more = "; …" if len(faults) > _NAMED else ""
        yield f"{key}: rows left out for an image that cannot be used: {len(faults):,} ({named}{more})"
    if moving := sum(image.animated for image in seen):
        yield f"{key}: images with several frames, of which the first is used: {moving:,}"
    # Beyond this shape one side is stretched to a whole soft token.
    if thin := sum(max(one.width, one.height) > patching.budget * min(one.width, one.height) for one in seen):
        shape = f"more than data.image_tokens = {patching.budget} times as long as wide"
        yield f"{key}: images {shape}, which the model sees squeezed: {thin:,}"
