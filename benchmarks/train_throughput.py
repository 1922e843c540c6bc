"""Writes tokens a second of LoRA training on this machine to benchmarks/records/train_throughput_<cpu or GPU>.json: the
same rows, model and rank in Gemsmith's two backends and in TRL as its documentation has it.

    python benchmarks/train_throughput.py [pairs, default 2] [side ...]

On CPU the 84 M float32 model of train_cpu.py, packed rows of 1024; on a GPU the 31B with random bfloat16 weights, rank
64, packed rows of 4096. Sides take turns, each in a process of its own. Ends with an error if two sides do not give the
same first loss.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from data_throughput import write_rows
from gemsmith import __version__
from gemsmith.arch import Variant, find_variant, lora_targets, text_tensors, vision_tensors
from gemsmith.checkpoints.peft import target_pattern
from gemsmith.hardware import load_catalog
from gemsmith.runs.run import host_info
from short import RECORDS, SHORT, peak_memory_bytes
from tiny_checkpoints import make_config, make_tokenizer
from train_cpu import VARIANT

SIDES = ("gemsmith-trl", "gemsmith-tunix", "trl")
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "jax", "jaxlib", "google-tunix", "qwix")
WARM_UP = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and where the weights may lie: those of the 31B in memory, since few disks hold them."""

    variant: Variant
    dtype: str
    length: int
    rows: int
    micro_batches: int
    steps: int
    rank: int
    remat: str
    folder: str | None


CPU = Case(
    variant=VARIANT, dtype="float32", length=1024, rows=2, micro_batches=1, steps=3, rank=16, remat="auto", folder=None
)
if SHORT:
    CPU = replace(CPU, length=512, rows=1)
GPU = Case(
    variant=find_variant("gemma4-31b"),
    dtype="bfloat16",
    length=4096,
    rows=4,
    micro_batches=4,
    steps=8,
    rank=64,
    remat="layer",
    folder="/dev/shm",
)
if SHORT:
    GPU = replace(GPU, variant=find_variant("gemma4-12b"), steps=5)


def write_model(case: Case, folder: Path) -> None:
    """A checkpoint of random weights, a file a layer, a process a core: 57 GiB in seconds."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(make_config(case.variant, case.dtype)))
    layers: dict[int | None, list[Any]] = {}
    for tensor in (*text_tensors(case.variant), *vision_tensors(case.variant)):
        layers.setdefault(tensor.layer, []).append(tensor)
    files = [f"model-{'words' if layer is None else layer}.safetensors" for layer in layers]
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_weights, [folder / file for file in files], layers.values(), [case.dtype] * len(files)))
    places = {tensor.name: file for file, some in zip(files, layers.values(), strict=True) for tensor in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    make_tokenizer(folder)


def write_weights(file: Path, tensors: list[Any], dtype: str) -> None:
    from safetensors.numpy import save_file

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    block = np.random.default_rng(0).standard_normal(2**22, np.float32)
    weights = {tensor.name: random_weight(tensor, block).astype(kind) for tensor in tensors}
    save_file(weights, file, metadata={"format": "pt"})


def random_weight(tensor: Any, block: np.ndarray) -> np.ndarray:
    if len(tensor.shape) < 2:
        return np.ones(tensor.shape, np.float32)
    return np.resize(block, tensor.shape) * np.float32(tensor.shape[-1] ** -0.5)


def recipe_of(case: Case, backend: str, checkpoint: Path, rows: Path) -> Any:
    from gemsmith.recipe.load import build_recipe

    return build_recipe(
        {
            "checkpoint": str(checkpoint),
            "data": {"train": str(rows), "max_length": case.length, "on_too_long": "drop"},
            "lora": {"rank": case.rank, "alpha": 2.0 * case.rank, "dropout": 0.0},
            "optimizer": {"warmup_steps": 0},
            "train": {
                "backend": backend,
                "max_steps": case.steps,
                "global_batch_size": case.rows,
                "gradient_accumulation_steps": case.micro_batches,
                "dtype": case.dtype,
                "remat": case.remat,
                "save_steps": case.steps,
            },
        }
    )


def train_ours(case: Case, backend: str, checkpoint: Path, rows: Path, folder: Path) -> dict[str, Any]:
    from gemsmith.data.stage import prepare_data
    from gemsmith.runs.run import open_run
    from gemsmith.train.logging import StepLog
    from gemsmith.train.stage import train

    if backend == "tunix" and case is GPU:
        import jax

        assert jax.default_backend() == "gpu", "this JAX has no CUDA plugin"
    ends_cpu_s: list[float] = []
    add = StepLog.add

    def add_timed(log: Any, step: Any) -> None:
        ends_cpu_s.append(time.process_time())
        add(log, step)

    StepLog.add = add_timed  # type: ignore[assignment, method-assign]
    run = open_run(folder / "run", recipe_of(case, backend, checkpoint, rows))
    prepare_data(run)
    record = train(run)
    timed = record.steps[WARM_UP:]
    return {
        "losses": [step.loss for step in record.steps],
        "step_s": [step.step_s for step in timed],
        "cpu_s": np.diff(ends_cpu_s)[WARM_UP - 1 :].tolist(),
        "tokens": [step.real_tokens for step in timed],
        "peak_memory_bytes": record.peak_memory_bytes,
        "attention": record.attention,
    }


def train_theirs(case: Case, checkpoint: Path, rows: Path, folder: Path) -> dict[str, Any]:
    """SFTTrainer on conversational prompts and completions, packed, with its defaults for all that the case does not
    name.
    """
    import torch
    import transformers
    from trl import SFTTrainer  # type: ignore[attr-defined]

    tokens: list[int] = []
    ends_s: list[float] = []
    ends_cpu_s: list[float] = []

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any) -> Any:
            tokens.append(inputs["input_ids"].numel())
            return super().training_step(model, inputs, *arguments)

    class Timing(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends_s.append(time.perf_counter())
            ends_cpu_s.append(time.process_time())

    data, config, lora = theirs(case, rows, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    trainer = Counting(
        str(checkpoint), config, train_dataset=data, processing_class=tokenizer, peft_config=lora, callbacks=[Timing()]
    )
    trainer.train()
    model: Any = trainer.model
    cuda = torch.cuda.is_available()
    each = [sum(tokens[step * case.rows : (step + 1) * case.rows]) for step in range(case.steps)]
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "step_s": np.diff(ends_s)[WARM_UP - 1 :].tolist(),
        "cpu_s": np.diff(ends_cpu_s)[WARM_UP - 1 :].tolist(),
        "tokens": each[WARM_UP:],
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else peak_memory_bytes(),
        "attention": {"all": model.config._attn_implementation},
    }


def theirs(case: Case, rows: Path, folder: Path) -> tuple[Any, Any, Any]:
    """The data, the settings and the adapter that SFTTrainer is given."""
    import datasets
    import peft
    import torch
    from trl import SFTConfig  # type: ignore[attr-defined]

    lines = [json.loads(line)["messages"] for line in rows.read_text().splitlines()]
    data = datasets.Dataset.from_list([{"prompt": messages[:1], "completion": messages[1:]} for messages in lines])
    config = SFTConfig(
        str(folder / "out"),
        max_length=case.length,
        packing=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=case.rows,
        max_steps=case.steps,
        gradient_checkpointing=case.remat == "layer",
        bf16=case.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        model_init_kwargs={"dtype": case.dtype},
    )
    modules = target_pattern(target.module for target in lora_targets(case.variant))
    lora = peft.LoraConfig(r=case.rank, lora_alpha=2 * case.rank, lora_dropout=0.0, target_modules=modules)
    return data, config, lora


def summary(case: Case, results: list[dict[str, Any]], peak_flops_per_s: float | None) -> dict[str, Any]:
    if errors := [result["error"] for result in results if "error" in result]:
        return {"error": errors[0]}
    rates = sorted(sum(result["tokens"]) / sum(result["step_s"]) for result in results)
    rate = statistics.median(rates)
    figures: dict[str, Any] = {
        "real_tokens_per_s": {"median": round(rate, 1), "low": round(rates[0], 1), "high": round(rates[-1], 1)},
        "real_tokens_per_cpu_s": round(
            statistics.median(sum(found["tokens"]) / sum(found["cpu_s"]) for found in results), 1
        ),
        "first_loss": results[0]["losses"][0],
        "last_loss": results[0]["losses"][-1],
        "tokens_of_a_step": round(statistics.mean(count for result in results for count in result["tokens"])),
        "peak_memory_bytes": max(result["peak_memory_bytes"] for result in results),
        "attention": results[0]["attention"],
    }
    if peak_flops_per_s:
        figures["mfu"] = round(rate * flops_per_token(case) / peak_flops_per_s, 4)
    return figures


def flops_per_token(case: Case) -> float:
    """Model FLOPs: the frozen matrices forward and backward to their inputs; attention, recomputation and adapters are
    not counted.
    """
    matrices = [tensor for tensor in text_tensors(case.variant) if len(tensor.shape) == 2]
    return 4.0 * sum(tensor.size for tensor in matrices)


def run_side(side: str, kind: str, checkpoint: Path, rows: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--side", side, kind, str(checkpoint), str(rows), folder]
        ended = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, text=True, env=os.environ | {"HF_HOME": folder}
        )
    return (
        json.loads(ended.stdout.splitlines()[-1])
        if ended.returncode == 0
        else {"error": f"ended with {ended.returncode}"}
    )


def device() -> tuple[str, str, float | None]:
    """The kind of case, the device's name for the record, and its peak."""
    import torch

    if not torch.cuda.is_available():
        return "cpu", "cpu", None
    name = torch.cuda.get_device_name().lower()
    words = set(name.split())
    # The boards called PCIe and NVL are slower than the catalog's, and GH200 is no H200.
    chip = (
        None
        if words & {"pcie", "nvl"}
        else next((chip for chip in load_catalog().chips.values() if chip.name in words), None)
    )
    return "gpu", chip.name if chip else name.replace(" ", "-"), chip.flops_per_s if chip else None


def folder_of(case: Case) -> str | None:
    """The case's folder where its weights have room there, else that of temporary files: a container's /dev/shm is 64
    MB.
    """
    size_bytes = sum(tensor.size for tensor in text_tensors(case.variant)) * (2 if case.dtype == "bfloat16" else 4)
    return case.folder if case.folder and shutil.disk_usage(case.folder).free > 1.02 * size_bytes else None


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 1 if SHORT else 2
    sides = tuple(sys.argv[2:]) or SIDES
    kind, name, peak = device()
    case = {"cpu": CPU, "gpu": GPU}[kind]
    with tempfile.TemporaryDirectory(dir=folder_of(case)) as temporary:
        checkpoint, rows = Path(temporary) / "base", Path(temporary) / "rows.jsonl"
        write_model(case, checkpoint)
        write_rows(rows, case.steps * case.rows * case.length // 100, length=case.length)
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for pair in range(pairs):
            for side in sides if pair % 2 else sides[::-1]:
                results[side].append(run_side(side, kind, checkpoint, rows))
                print(side, results[side][-1], file=sys.stderr)
    figures = {side: summary(case, found, peak) for side, found in results.items()}
    record = {
        "schema_version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "python": platform.python_version(),
        "packages": package_versions(),
        "machine": host_info().model_dump(),
        "device": name,
        "case": asdict(case),
        "pairs": pairs,
        "sides": figures,
    }
    rates = {side: found["real_tokens_per_s"]["median"] for side, found in figures.items() if "error" not in found}
    if "trl" in rates:
        record["over_trl"] = {side: round(rate / rates["trl"], 3) for side, rate in rates.items() if side != "trl"}
        cpu = {side: figures[side]["real_tokens_per_cpu_s"] for side in rates}
        record["over_trl_by_cpu_s"] = {side: round(rate / cpu["trl"], 3) for side, rate in cpu.items() if side != "trl"}
    if kind == "cpu" and (
        failed := [f"{side}: {found['error']}" for side, found in figures.items() if "error" in found]
    ):
        sys.exit(f"error: {'; '.join(failed)}")  # a GPU may be too small for a side, which is then its result
    (RECORDS / f"train_throughput_{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    losses = [figures[side]["first_loss"] for side in sides if side.startswith("gemsmith") and side in rates]
    tolerance = 1e-5 if case.dtype == "float32" else 1e-2
    if losses and max(losses) - min(losses) > tolerance * max(losses):
        sys.exit(f"error: the backends do not compute the same: first losses {losses}")


def main_of_side(side: str, kind: str, checkpoint: Path, rows: Path, folder: Path) -> None:
    case = {"cpu": CPU, "gpu": GPU}[kind]
    try:
        if side == "trl":
            result = train_theirs(case, checkpoint, rows, folder)
        else:
            result = train_ours(case, side.removeprefix("gemsmith-"), checkpoint, rows, folder)
    except Exception as error:  # noqa: BLE001 - a side that cannot run here is a result
        traceback.print_exc()
        result = {
            "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else ''}"
        }
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        main_of_side(sys.argv[2], sys.argv[3], *map(Path, sys.argv[4:]))
    else:
        main()
