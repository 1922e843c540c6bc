"""Writes how fast rows become packed, masked tokens, here and in TRL's own preparation, to
benchmarks/records/data_throughput.json.

    python benchmarks/data_throughput.py [pairs, default 3] [rows, default 30000]

Both sides read the same JSONL of prompts and answers, render it with the same chat template and tokenizer, mask the
prompts and pack into rows of 4096, in processes that take turns and are bound to two cores. Ours also writes the arrays
and their checksums. Beside it, CPU-s of encoding word by word over the tokenizer's for whole texts: words that come
often, as in prose, or once, and text without spaces.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith import __version__
from gemsmith.arch import find_variant
from gemsmith.runs.run import host_info
from short import RECORDS, SHORT

RECORD = RECORDS / "data_throughput.json"
LENGTH, CORES = 4096, 2
VARIANT = replace(find_variant("tiny-31b"), name="custom", context=LENGTH)
SIDES = ("gemsmith", "trl")
PACKAGES = ("numpy", "tokenizers", "jinja2", "torch", "transformers", "trl", "datasets")


def write_rows(file: Path, count: int, *, length: int = LENGTH) -> None:
    """Rows of one to many Verilog tasks each, about as many as fit: the lengths of real instruction data, which made
    rows do not have.
    """
    from gemsmith.data.dataset import read_dataset
    from gemsmith.recipe.schema import GeneratedData
    from gemsmith.tasks.messages import text_of

    random = np.random.default_rng(0)
    tasks = [
        [text_of(message) for message in row.messages]
        for row in read_dataset(GeneratedData(task="verilog", rows=4096), seed=0).documents
    ]
    with file.open("w") as stream:
        for parts in np.clip(random.lognormal(1.0, 0.8, count), 1, length // 160).astype(int):
            chosen = [tasks[index] for index in random.integers(len(tasks), size=parts)]
            prompt, answer = ("\n\n".join(task[side] for task in chosen) for side in (0, -1))
            messages = [{"role": role, "content": text} for role, text in (("user", prompt), ("assistant", answer))]
            stream.write(json.dumps({"messages": messages}) + "\n")


def prepare_ours(checkpoint: Path, rows: Path, folder: Path) -> dict[str, Any]:
    from gemsmith.data.dataset import read_dataset
    from gemsmith.data.stage import prepare_data
    from gemsmith.recipe.load import build_recipe
    from gemsmith.runs.run import open_run

    recipe = build_recipe(
        {
            "checkpoint": str(checkpoint),
            "data": {"train": str(rows), "max_length": LENGTH, "on_too_long": "drop"},
            "train": {"global_batch_size": 1},
        }
    )
    run = open_run(folder / "run", recipe)
    begin_s = time.perf_counter()
    record = prepare_data(run)
    seconds = time.perf_counter() - begin_s
    read_s = time.perf_counter()
    read_dataset(str(rows))
    reading_s = time.perf_counter() - read_s
    return {
        "seconds": seconds,
        "without_reading_s": seconds - reading_s,
        "tokens": record.tokens,
        "trained": record.supervised_tokens,
        "packed_rows": record.packed_rows,
    }


def prepare_theirs(checkpoint: Path, rows: Path, folder: Path) -> dict[str, Any]:
    """As TRL's documentation has it: conversational prompt and completion, loss on the completion, packed
    best-fit-decreasing.
    """
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    datasets.disable_progress_bars()
    found: dict[str, Any] = {}

    class Timed(SFTTrainer):
        def _prepare_dataset(self, dataset: Any, *arguments: Any) -> Any:  # noqa: ARG002 - read below, to be timed as well
            begin_s = time.perf_counter()
            read = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(folder / "cache"))
            split = read.map(
                lambda row: {"prompt": row["messages"][:1], "completion": row["messages"][1:]},
                remove_columns="messages",
                num_proc=CORES,
            )
            prepare_s = time.perf_counter()
            prepared = super()._prepare_dataset(split, *arguments)
            found["seconds"], found["without_reading_s"] = (
                time.perf_counter() - since for since in (begin_s, prepare_s)
            )
            columns = prepared.with_format("numpy")
            found["tokens"] = int(sum(len(ids) for ids in columns["input_ids"]))
            found["trained"] = int(sum(np.count_nonzero(labels != -100) for labels in columns["labels"]))
            found["packed_rows"] = len(prepared)
            return prepared

    message = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    config = SFTConfig(
        str(folder / "out"),
        max_length=LENGTH,
        packing=True,
        dataset_num_proc=CORES,
        use_cpu=True,
        report_to=[],
        bf16=False,
        max_steps=1,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    Timed(model, config, train_dataset=datasets.Dataset.from_list([message]), processing_class=tokenizer)
    return found


def run_side(side: str, checkpoint: Path, rows: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, side, str(checkpoint), str(rows), folder]
        environment = os.environ | {
            "HF_HOME": folder,
            "TOKENIZERS_PARALLELISM": "true" if side == "gemsmith" else "false",
        }
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    first = results[0]
    seconds = sorted(result["seconds"] for result in results)
    return {
        "seconds": {
            "median": round(statistics.median(seconds), 3),
            "low": round(seconds[0], 3),
            "high": round(seconds[-1], 3),
        },
        "tokens_per_s": round(first["tokens"] / statistics.median(seconds)),
        "without_reading_s": round(statistics.median(result["without_reading_s"] for result in results), 3),
        "packs_full": round(first["tokens"] / (first["packed_rows"] * LENGTH), 5),
        **{name: first[name] for name in ("tokens", "trained", "packed_rows")},
    }


def encode_ratios(checkpoint: Path) -> dict[str, float]:
    """CPU-s of an encoder that knows no word yet over its tokenizer, one thread each: medians of three."""
    from gemsmith.data.encode import WordEncoder
    from gemsmith.data.tokenize import open_tokenizer

    random, tokenizer = np.random.default_rng(0), open_tokenizer(checkpoint)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    once = ["".join(random.choice(letters, size)) for size in random.integers(2, 10, 300_000)]
    ranks = random.zipf(1.2, 1_000_000)
    often = [once[rank] for rank in ranks[ranks < 50_000][:300_000]]
    cases = {"zipf": (" ", often), "once": (" ", once), "no spaces": ("", once)}
    ratios = {}
    for name, (space, words) in cases.items():
        texts, found = [space.join(words[start : start + 1000]) for start in range(0, len(words), 1000)], []
        for _ in range(3):
            times = [time.process_time()]
            whole = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
            times.append(time.process_time())
            ids = WordEncoder(tokenizer).encode(texts)
            times.append(time.process_time())
            assert [each.tolist() for each in ids] == whole
            found.append((times[2] - times[1]) / (times[1] - times[0]))
        ratios[name] = round(statistics.median(found), 2)
    return ratios


def main() -> None:
    pairs, count = (int(value) for value in (sys.argv[1:] + ["2" if SHORT else "3", "30000"][len(sys.argv) - 1 :])[:2])
    with tempfile.TemporaryDirectory() as temporary:
        from tiny_checkpoints import make_checkpoint

        checkpoint, rows = make_checkpoint(VARIANT, Path(temporary) / "base"), Path(temporary) / "rows.jsonl"
        write_rows(rows, count)
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for pair in range(pairs):
            for side in SIDES if pair % 2 else SIDES[::-1]:
                results[side].append(run_side(side, checkpoint, rows))
                print(side, results[side][-1], file=sys.stderr)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        encoding = encode_ratios(checkpoint)
    sides = {side: summary(found) for side, found in results.items()}
    record = {
        "schema_version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "machine": host_info().model_dump(),
        "rows": count,
        "length": LENGTH,
        "cores": CORES,
        "pairs": pairs,
        "sides": sides,
        "encode_over_tokenizer": encoding,
        "ours_over_theirs": round(sides["gemsmith"]["tokens_per_s"] / sides["trl"]["tokens_per_s"], 3),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(sides, indent=1))


def main_of_side(side: str, checkpoint: Path, rows: Path, folder: Path) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    prepare = {"gemsmith": prepare_ours, "trl": prepare_theirs}[side]
    print(json.dumps(prepare(checkpoint, rows, folder)))


if __name__ == "__main__":
    if len(sys.argv) == 5:
        main_of_side(sys.argv[1], *map(Path, sys.argv[2:]))
    else:
        main()
