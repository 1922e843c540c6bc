"""Writes how long a merge takes beside `cp` and PEFT's own, and how much memory, to benchmarks/records/merge.json.

    python benchmarks/merge.py [rounds, default 3] [folder for 40 GB, default a temporary one]

A bfloat16 checkpoint in the shape of the 31B is made twice: of about 3 GB, on which `cp`, `gemsmith export` and PEFT's
merge_and_unload + save_pretrained take turns, and of more than 10 GB, on which the first two do; each round begins with
another of them. Each is a process of its own, once with the checkpoint on the disk alone (cold) and once with it in the
page cache (warm). `cp` ends when its bytes are in memory, ours when they are on the disk, so `cp` is followed by `sync`
of its files and both times are recorded. numpy's OpenBLAS picks its own kernels: variables of the shell that would
choose others (OPENBLAS_*) are kept from the processes.
"""

import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith import __version__
from gemsmith.arch import Tensor, Variant, find_variant, lora_targets, text_tensors
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import Adapter, LoraPair, write_peft_adapter
from gemsmith.runs.run import host_info
from short import RECORDS, SHORT
from tiny_checkpoints import make_config, make_tokenizer

RECORD = RECORDS / "merge.json"
WIDTHS: dict[str, Any] = {
    "embed_dim": 2048,
    "ffn": 8192,
    "heads": 16,
    "kv_heads": 8,
    "global_kv_heads": 2,
    "vocabulary": 65_536,
    "context": 4096,
}
SMALL_LAYERS, LARGE_LAYERS = (6, 12) if SHORT else (18, 66)
SHARD_BYTES = 1_500_000_000
RANK = ALPHA = 64
PACKAGES = ("numpy", "ml_dtypes", "torch", "transformers", "peft")
_GIB = 2**30
# Of base, adapter and target, what `run` measures.
Side = Callable[[Path, Path, Path], dict[str, float]]
_BLOCK_VALUES = 2**23
# A process's peak memory is at least that of the one that started it: this one is small.
_LAUNCH = """
import json, resource, subprocess, sys, time
begin = time.perf_counter()
code = subprocess.call(sys.argv[1:])
wall_s, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
cpu_s, peak_memory_bytes = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "peak_memory_bytes": peak_memory_bytes}))
sys.exit(code)
"""
_PEFT = """
import sys, torch, transformers
from peft import PeftModel
base, adapter, out = sys.argv[1:]
model = transformers.Gemma4ForConditionalGeneration.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
transformers.AutoTokenizer.from_pretrained(base).save_pretrained(out)
"""


def make_base(folder: Path, variant: Variant) -> None:
    """Writes a checkpoint of random weights, a block in memory at a time."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(make_config(variant)))
    make_tokenizer(folder)
    random = np.random.Generator(np.random.SFC64(0))
    shards: list[list[Tensor]] = [[]]
    for tensor in text_tensors(variant):
        if 2 * sum(other.size for other in shards[-1]) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, tensors, random)
        weight_map |= {tensor.name: name for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_shard(file: Path, tensors: Sequence[Tensor], random: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [end, end + 2 * tensor.size],
        }
        end += 2 * tensor.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for begin in range(0, tensor.size, _BLOCK_VALUES):
                count = min(_BLOCK_VALUES, tensor.size - begin)
                # Random signs and significands with an exponent of 2**-7: bytes of bfloat16 without computing normal
                # numbers.
                stream.write((np.frombuffer(random.bytes(2 * count), np.uint16) & 0x807F | (120 << 7)).tobytes())


def make_adapter(folder: Path, variant: Variant) -> None:
    random = np.random.default_rng(1)
    modules = {}
    for target in lora_targets(variant):
        out, inner = target.shape
        a = random.standard_normal((RANK, inner), dtype=np.float32) / np.float32(inner**0.5)
        modules[target.module] = LoraPair(
            a=a, b=random.standard_normal((out, RANK), dtype=np.float32) * np.float32(0.01)
        )
    write_peft_adapter(Adapter(modules=modules, rank=RANK, alpha=ALPHA), folder, "base")


def run(command: Sequence[str | Path], **environment: str) -> dict[str, float]:
    """Seconds, CPU-seconds and peak memory of a process; raises where it fails."""
    load = os.getloadavg()[0]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    launch = [sys.executable, "-S", "-c", _LAUNCH, *(str(word) for word in command)]
    done = subprocess.run(launch, env=kept | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"load_before": load}


def run_cp(base: Path, _adapter: Path, out: Path) -> dict[str, float]:
    copied = run(["cp", "-r", base, out])
    synced = run(["sync", *sorted(out.iterdir())])
    return copied | {"wall_with_sync_s": copied["wall_s"] + synced["wall_s"]}


def run_ours(base: Path, adapter: Path, out: Path) -> dict[str, float]:
    return run([sys.executable, "-m", "gemsmith", "export", "--base", base, "--adapter", adapter, "--out", out])


def run_peft(base: Path, adapter: Path, out: Path) -> dict[str, float]:
    return run([sys.executable, "-c", _PEFT, base, adapter, out], HF_HUB_OFFLINE="1")


def drop_from_cache(folder: Path) -> None:
    """The next one to read the folder's files reads them from the disk."""
    for file in (file for file in folder.iterdir() if file.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_into_cache(folder: Path) -> None:
    for file in (file for file in folder.iterdir() if file.is_file()):
        with file.open("rb") as stream:
            while stream.read(_BLOCK_VALUES):
                pass


def take_turns(place: Path, layers: int, rounds: int, sides: Mapping[str, Side]) -> dict[str, Any]:
    """Each side's runs on a checkpoint of so many layers, one after the other, `rounds` times; what they wrote is
    deleted.
    """
    variant = replace(find_variant("gemma4-31b"), name="custom", layers=layers, **WIDTHS)
    base, adapter, out = place / "base", place / "adapter", place / "out"
    make_base(base, variant)
    make_adapter(adapter, variant)
    places = open_checkpoint(str(base)).places.values()
    caches = {"cold": drop_from_cache, "warm": read_into_cache}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {cache: {name: [] for name in sides} for cache in caches}
    try:
        for number, cache in itertools.product(range(rounds), caches):
            first = number % len(sides)  # what ran before slows or speeds the next one
            for name in ([*sides] * 2)[first : first + len(sides)]:
                os.sync()
                caches[cache](base)
                runs[cache][name].append(sides[name](base, adapter, out))
                print(
                    f"{layers} layers, round {number + 1}, {cache}, {name}: {runs[cache][name][-1]}",
                    file=sys.stderr,
                    flush=True,
                )
                shutil.rmtree(out)
    finally:
        for folder in (base, adapter, out):
            shutil.rmtree(folder, ignore_errors=True)
    result: dict[str, Any] = {
        "bytes": sum(item.end - item.begin for item in places),
        "adapted_bytes": sum(2 * target.size for target in lora_targets(variant)),
        "largest_tensor_bytes": max(item.end - item.begin for item in places),
        "shards": len({item.file for item in places}),
        "layers": layers,
        "rank": RANK,
    }
    return result | {cache: summary(found) for cache, found in runs.items()}


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of each side, their ratios, and the runs themselves."""
    medians = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in runs.items()
    }
    cp, ours = medians["cp"], medians["gemsmith"]
    ratios = {
        "gemsmith_to_cp": ours["wall_s"] / cp["wall_s"],
        "gemsmith_to_cp_with_sync": ours["wall_s"] / cp["wall_with_sync_s"],
        "gemsmith_peak_memory_gib": ours["peak_memory_bytes"] / _GIB,
    }
    if "peft" in medians:
        peft = medians["peft"]
        ratios |= {
            "peft_to_gemsmith": peft["wall_s"] / ours["wall_s"],
            "peft_peak_memory_gib": peft["peak_memory_bytes"] / _GIB,
        }
    return {"ratios": ratios, "medians": medians, "runs": runs}


def main(rounds: int, folder: Path | None) -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    both: dict[str, Side] = {"cp": run_cp, "gemsmith": run_ours}
    with tempfile.TemporaryDirectory() if folder is None else contextlib.nullcontext(str(folder)) as name:
        place = Path(name)
        small = take_turns(place, SMALL_LAYERS, rounds, both | {"peft": run_peft})
        large = take_turns(place, LARGE_LAYERS, rounds, both)
    record = {
        "benchmark": "merge",
        "started": started,
        "gemsmith": __version__,
        "versions": {name: version(name) for name in PACKAGES},
        "machine": host_info().model_dump(),
        "cores_used": len(os.sched_getaffinity(0)),
        "small": small,
        "large": large,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    both_sizes = {"small": small, "large": large}
    print(
        json.dumps(
            {size: {cache: found[cache]["ratios"] for cache in ("cold", "warm")} for size, found in both_sizes.items()},
            indent=1,
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1 if SHORT else 3, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
