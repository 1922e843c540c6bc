"""Writes how many pictures a core decodes and cuts into patches, to benchmarks/records/picture_throughput.json.

    python benchmarks/picture_throughput.py [pictures, default 60] [rounds, default 3]

The pictures are JPEGs of 500 x 375 pixels, made from a seed: soft shapes with grain, of some 60 kB. Counted is CPU
time, which other work on the machine changes less than the clock's. `check` is what the data stage does with each
picture once; `cut` what a worker does with it in each epoch; `ahead` the same with its way to the training process and
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
from gemsmith.images.check import ImageInfo, check_picture, cut_picture
from gemsmith.images.patches import BUDGETS, Patching
from gemsmith.images.workers import decode_ahead
from gemsmith.runs.provenance import this_machine
from short import RECORDS, SHORT

RECORD = RECORDS / "picture_throughput.json"
WIDTH, HEIGHT, A_STEP, PROCESSES = 500, 375, 8, 2
PASSES = {"ahead": 10}
"""How often a side goes through the pictures, where it is more than once."""
PACKAGES = ("numpy", "pillow", "transformers")


def write_photos(folder: Path, count: int) -> list[str]:
    """Pictures whose shapes are soft and whose grain is fine, as a camera's."""
    files = []
    for seed in range(count):
        random = np.random.default_rng(seed)
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8))
        soft = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
        grain = random.normal(0, 6, (HEIGHT, WIDTH, 1)).astype(np.int16)
        files.append(folder / f"{seed}.jpg")
        Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8)).save(files[-1], quality=90)
    return [str(file) for file in files]


def sides(pictures: list[ImageInfo], patching: Patching) -> dict[str, Callable[[], object]]:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(max_soft_tokens=patching.budget)
    steps = [(begin, pictures[begin : begin + A_STEP]) for begin in range(0, len(pictures), A_STEP)]
    steps *= PASSES["ahead"]

    def theirs() -> None:
        for picture in pictures:
            with Image.open(picture.path) as opened:
                processor.preprocess([opened], return_tensors="np")

    return {
        "check": lambda: [check_picture(picture.path, patching) for picture in pictures],
        "cut": lambda: [cut_picture(picture, patching) for picture in pictures],
        "ahead": lambda: [None for _ in decode_ahead(steps, patching, processes=PROCESSES)],
        "transformers": theirs,
    }


def cpu_s() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(pictures: list[ImageInfo], budget: int, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, run in sides(pictures, Patching(budget=budget)).items():
            begin_s = cpu_s()
            run()
            if number:  # the first warms caches
                found.setdefault(name, []).append(PASSES.get(name, 1) * len(pictures) / (cpu_s() - begin_s))
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
            pictures = [check_picture(file, Patching(budget=budget)) for file in files]
            rates[str(budget)] = {"soft_tokens": pictures[0].soft_tokens, **dict(measure(pictures, budget, rounds))}
            print(budget, rates[str(budget)], file=sys.stderr)
        file_bytes = round(statistics.mean(Path(file).stat().st_size for file in files))
    record = {
        "schema_version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "machine": this_machine().model_dump(),
        "pictures": {"count": count, "width": WIDTH, "height": HEIGHT, "format": "JPEG", "mean_file_bytes": file_bytes},
        "rounds": rounds,
        "wall_s": round(time.perf_counter() - begin_s, 1),
        "pictures_per_cpu_s": rates,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
