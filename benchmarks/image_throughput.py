"""Writes how many images a core decodes and cuts into patches, to benchmarks/records/image_throughput.json.

    python benchmarks/image_throughput.py [images, default 60] [rounds, default 3]

The images are JPEGs of 500 x 375 pixels, made from a seed: soft shapes with grain, of some 60 kB. Counted is CPU
time, which other work on the machine changes less than the clock's. `check` is what the data stage does with each
image once; `cut` what a worker does with it in each epoch; `ahead` the same with its way to the training process and
the scaling to float32 there, ten times over, in worker processes that are started for it, theirs and ours counted;
`transformers` is the image processor's own path in one process: Pillow opens the file, Gemma4ImageProcessorPil does the
rest, padding included. Rounds take turns.
"""

import json
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image

from gemsmith import __version__
from gemsmith.images.check import ImageInfo, patchify, validate_image
from gemsmith.images.patches import BUDGETS, PatchConfig
from gemsmith.images.workers import decode_ahead
from gemsmith.runs.run import host_info
from short import RECORDS, SHORT

RECORD = RECORDS / "image_throughput.json"
WIDTH, HEIGHT, A_STEP, PROCESSES = 500, 375, 8, 2
PASSES = {"ahead": 10}
"""How often a side goes through the images, where it is more than once."""
PACKAGES = ("numpy", "pillow", "transformers")


def write_photos(folder: Path, count: int) -> list[str]:
    """Images whose shapes are soft and whose grain is fine, as a camera's."""
    files = []
    for seed in range(count):
        random = np.random.default_rng(seed)
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8))
        soft = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
        grain = random.normal(0, 6, (HEIGHT, WIDTH, 1)).astype(np.int16)
        files.append(folder / f"{seed}.jpg")
        Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8)).save(files[-1], quality=90)
    return [str(file) for file in files]


def sides(images: list[ImageInfo], patching: PatchConfig) -> dict[str, Callable[[], object]]:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(max_soft_tokens=patching.budget)
    steps = [(begin, images[begin : begin + A_STEP]) for begin in range(0, len(images), A_STEP)]
    steps *= PASSES["ahead"]

    def theirs() -> None:
        for image in images:
            with Image.open(image.path) as opened:
                processor.preprocess([opened], return_tensors="np")

    return {
        "check": lambda: [validate_image(image.path, patching) for image in images],
        "cut": lambda: [patchify(image, patching) for image in images],
        "ahead": lambda: [None for _ in decode_ahead(steps, patching, processes=PROCESSES)],
        "transformers": theirs,
    }


def cpu_s() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(images: list[ImageInfo], budget: int, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, run in sides(images, PatchConfig(budget=budget)).items():
            begin_s = cpu_s()
            run()
            if number:  # the first warms caches
                found.setdefault(name, []).append(PASSES.get(name, 1) * len(images) / (cpu_s() - begin_s))
    for name, rates in found.items():
        yield (
            name,
            {"median": round(statistics.median(rates), 1), "low": round(min(rates), 1), "high": round(max(rates), 1)},
        )


def main() -> None:
    count, rounds = (
        int(value) for value in (sys.argv[1:] + (["8", "1"] if SHORT else ["60", "3"])[len(sys.argv) - 1 :])[:2]
    )
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = write_photos(Path(folder), count)
        rates = {}
        for budget in BUDGETS:
            images = [validate_image(file, PatchConfig(budget=budget)) for file in files]
            rates[str(budget)] = {"soft_tokens": images[0].soft_tokens, **dict(measure(images, budget, rounds))}
            print(budget, rates[str(budget)], file=sys.stderr)
        file_bytes = round(statistics.mean(Path(file).stat().st_size for file in files))
    record = {
        "schema_version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "machine": host_info().model_dump(),
        "images": {"count": count, "width": WIDTH, "height": HEIGHT, "format": "JPEG", "mean_file_bytes": file_bytes},
        "rounds": rounds,
        "wall_s": round(time.perf_counter() - begin_s, 1),
        "images_per_cpu_s": rates,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
