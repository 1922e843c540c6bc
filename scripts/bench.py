"""Runs every benchmark in its short form and holds what it says against a bound, or says which records are old.

    python scripts/bench.py [NAME ...]     ends with 1 where one fails or lies beyond its bound
    python scripts/bench.py --records      a line for each record that is older than the locks or than its code

Records are written beside the benchmarks only by these themselves; short ones go to a temporary folder. Bounds are for
a machine that others use as well: they tell what was lost, not what a quiet machine reaches.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS, RECORDS = ROOT / "benchmarks", ROOT / "benchmarks" / "records"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What its record says in one number, and how low or high that may be."""

    what: str
    number: Callable[[Any], float]
    least: float = float("-inf")
    most: float = float("inf")
    least_on_intel: float | None = None
    """There MKL computes torch's matmuls, and is ahead of what XLA takes; elsewhere it is not."""
    code: tuple[str, ...]
    """Of src/gemsmith, what is measured."""
    record: str = ""
    needs: str = ""
    """A module without which it is left out."""


def _worst_gradient(record: Any) -> float:
    sides = record["variants"]["tiny-31b"]
    return max(each["off_float64"]["worst"] for name in sides if "gemsmith" in name for each in sides[name].values())


EVERY = {
    "cli_start": Benchmark(
        what="CPU-s of gemsmith --help",
        number=lambda record: record["commands"]["gemsmith --help"]["cpu_s"]["median"],
        most=0.3,
        code=("cli",),
    ),
    "cpu_memory": Benchmark(
        what="GiB that training holds beside its base",
        number=lambda record: max(case["beside_gib"] for case in record["cases"]),
        most=3,
        code=("hardware/model",),
    ),
    "data_throughput": Benchmark(
        what="tokens/s over TRL's", number=lambda record: record["ours_over_theirs"], least=2.65, code=("data",)
    ),
    "first_model": Benchmark(
        what="s from the clone to an answer, training left out where short",
        number=lambda record: record["total_s"],
        most=600,
        code=(),
    ),
    "launch_drill": Benchmark(
        what="adapters the same", number=lambda record: record["all_adapters_the_same"], least=1, code=("launch",)
    ),
    "load_stress": Benchmark(
        what="requests lost",
        number=lambda record: record["requests"] - record["accounted_for"],
        most=0,
        code=("bench",),
    ),
    "merge": Benchmark(
        what="PEFT's seconds over ours",
        number=lambda record: record["small"]["warm"]["ratios"]["peft_to_gemsmith"],
        least=3,
        code=("export",),
    ),
    "image_throughput": Benchmark(
        what="images a CPU-s over transformers', 280 soft tokens",
        number=lambda record: (
            record["images_per_cpu_s"]["280"]["cut"]["median"]
            / record["images_per_cpu_s"]["280"]["transformers"]["median"]
        ),
        least=1.5,
        code=("images",),
    ),
    "plan_accuracy": Benchmark(
        what="largest error of memory beside XLA's",
        number=lambda record: record["memory"]["largest_error"],
        most=0.08,
        code=("plan", "hardware/model"),
    ),
    "plan_calibration": Benchmark(
        what="least of predicted over measured",
        number=lambda record: min(model["predicted_over_measured"] for model in record["models"].values()),
        least=0.6,
        code=("plan", "models"),
    ),
    "serving_calibration": Benchmark(
        what="share of loads in the plan's range",
        number=lambda record: sum(each["within"] for each in record["predictions"]) / len(record["predictions"]),
        least=0.25,
        code=("plan",),
    ),
    "sigterm": Benchmark(
        what="commands that SIGTERM ended wrongly",
        number=lambda record: not record["all_as_promised"],
        most=0,
        code=("train", "export"),
    ),
    "sizes": Benchmark(
        what="lines in src/gemsmith", number=lambda record: record["now"]["lines"], most=44_700, code=()
    ),
    "splits": Benchmark(what="a gradient's worst error", number=_worst_gradient, most=2e-4, code=("models", "train")),
    "tpu_compile": Benchmark(
        what="real tokens/s of e4b-v6e, estimated",
        number=lambda record: record["real_tokens_per_s"]["as_scheduled"],
        least=1,
        code=("models", "train/jax", "plan/aot"),
        record="tpu_compile/e4b-v6e.json",
        needs="libtpu",
    ),
    "train_cpu": Benchmark(
        what="transformers' seconds a step over ours",
        number=lambda record: 1 / record["threads"]["2"]["ours_over_theirs"]["cpu_s_ratio"],
        least=0.9,
        least_on_intel=0.75,
        code=("models", "train/jax"),
    ),
    "train_throughput": Benchmark(
        what="tokens a CPU-s over TRL's, JAX backend",
        number=lambda record: record["over_trl_by_cpu_s"]["gemsmith-tunix"],
        least=0.9,
        least_on_intel=0.7,
        code=("models", "train"),
        record="train_throughput_cpu.json",
    ),
    "wrong_inputs": Benchmark(
        what="wrong inputs not told in a line",
        number=lambda record: len(record["cases"]) - record["outcomes"]["told"],
        most=0,
        code=("cli", "data", "recipe", "checkpoints"),
    ),
}


def run_short(name: str) -> str | None:
    """Runs it; says what is wrong, if anything is."""
    benchmark = EVERY[name]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"GEMSMITH_BENCH_SHORT": folder}
        begin_s = time.monotonic()
        command = [sys.executable, "-W", "ignore", str(BENCHMARKS / f"{name}.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - begin_s
        file = Path(folder) / (benchmark.record or f"{name}.json")
        if done.returncode or not file.exists():
            return f"{name}: ended with {done.returncode}: {(done.stderr.strip() or 'no record').splitlines()[-1]}"
        found = float(benchmark.number(json.loads(file.read_text(encoding="utf-8"))))
    words = f"{name}: {benchmark.what}: {found:.3g}"
    print(f"{words} ({seconds:.0f} s)", flush=True)
    least = benchmark.least
    if benchmark.least_on_intel is not None and "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        least = benchmark.least_on_intel
    if found < least:
        return f"{words}, must be at least {least:g}"
    return f"{words}, must be at most {benchmark.most:g}" if found > benchmark.most else None


def pinned() -> dict[str, set[str]]:
    """Package -> its versions in the locks."""
    found: dict[str, set[str]] = {}
    for lock in (ROOT / "requirements").glob("*.lock"):
        for pin in re.findall(r"\S+==\S+", lock.read_text(encoding="utf-8")):
            name, _, version = pin.partition("==")
            found.setdefault(_normalized(name), set()).add(version.partition("+")[0])
    return found


def old_records() -> Iterator[str]:
    """A line for each record of other versions than the locks', or that was committed before what it measures."""
    locks = pinned()
    for name, benchmark in EVERY.items():
        file = RECORDS / (benchmark.record or f"{name}.json")
        record = json.loads(file.read_text(encoding="utf-8"))
        others = [
            f"{package} {version} (locked: {', '.join(sorted(locks[_normalized(package)]))})"
            for package, version in (record.get("packages") or record.get("versions") or {}).items()
            if _normalized(package) in locks and version.partition("+")[0] not in locks[_normalized(package)]
        ]
        if others:
            yield f"{file.relative_to(ROOT)}: measured with {', '.join(others)}"
        paths = [f"benchmarks/{name}.py", *(f"src/gemsmith/{part}" for part in benchmark.code)]
        newer = [path for path in paths if _committed(path) > _committed(str(file.relative_to(ROOT)))]
        if newer:
            yield f"{file.relative_to(ROOT)}: older than {', '.join(newer)}"


def _committed(path: str) -> int:
    """When it was last committed; 0 outside a repository."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct", "--", path]
    return int(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or 0)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(names: list[str]) -> None:
    if names == ["--records"]:
        for line in old_records():
            print(f"warning: {line}; run its benchmark again")
        return
    if unknown := [name for name in names if name not in EVERY]:
        sys.exit(f"error: there is no benchmark {unknown[0]}; allowed: {', '.join(EVERY)}")
    wrong = []
    for name in names or EVERY:
        if (needs := EVERY[name].needs) and importlib.util.find_spec(needs) is None:
            print(f"{name}: left out, {needs} is not installed")
        elif fault := run_short(name):
            wrong.append(fault)
    if wrong:
        sys.exit("\n".join(f"error: {line}" for line in wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
