"""Compiles the step that `gemsmith train` runs for TPUs that do not exist, and reads from the compiled program what it
costs.

    python benchmarks/tpu_compile.py [--case NAME ...] [--json] [--dump-hlo DIR]
    python benchmarks/tpu_compile.py --walk FILE.hlo --chip v5p

Writes benchmarks/records/tpu_compile/NAME.json, a case at a time. Each case is compiled in its own process, so that its
CPU seconds and memory are its own. Needs libtpu (requirements/tpu.lock) and no TPU.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import short
from gemsmith import __version__
from gemsmith.arch import find_variant
from gemsmith.errors import GemsmithError, MachineError
from gemsmith.hardware import Chip, load_catalog
from gemsmith.hardware.model import ImageWork, StepCost, images_of, step_cost
from gemsmith.hardware.model.work import forward_attention_flops
from gemsmith.plan.aot.compile import check_compiler, compile_in_child
from gemsmith.plan.aot.timeline import HOST_BYTES_PER_S, KERNEL_SHARE, KINDS, Costs, Operation, walk
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Recipe, Train
from gemsmith.runs.run import host_info
from gemsmith.train.jax.compile import FUSED_GATHERS, WHOLE_MATMULS, compiler_options

ROOT = Path(__file__).parents[1]
RECORDS = short.RECORDS / "tpu_compile"
GIB = 2**30
ASYNC = compiler_options("tpu", Train())  # as `gemsmith train` compiles
PLAIN = compiler_options("tpu", Train(optimizations="off"))
FUSED = FUSED_GATHERS | WHOLE_MATMULS  # without the sparse cores
SYNC = WHOLE_MATMULS  # nothing beside anything
PAPER_SHARE = 0.3  # of the positions in the paper's padded rows, arXiv 2605.25645, are real tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One step to compile. `train` and `lora` are the recipe's keys, `options` XLA's."""

    note: str
    variant: str = "gemma4-31b"
    topology: str = "v5p:2x2x1"
    rows: int
    length: int = 4096
    train: dict[str, Any]
    lora: dict[str, Any] = dataclasses.field(default_factory=lambda: {"rank": 64, "dropout": 0.0})
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    real_share: float = 1.0
    """Of the positions: packed rows are full."""
    images: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of rows with images, how many `images` of how many `soft_tokens` every row has room for."""

    @property
    def chip(self) -> Chip:
        return load_catalog().chips[self.topology.partition(":")[0]]

    @property
    def room(self) -> ImageWork | None:
        """What every row has room for; None where rows are text alone."""
        return images_of(self.recipe, find_variant(self.variant), **self.images) if self.images else None

    @property
    def recipe(self) -> Recipe:
        data = {"train": "absent", "max_length": self.length}
        train = {"global_batch_size": self.rows, **self.train}
        return build_recipe(
            {"checkpoint": "absent", "model": self.variant, "data": data, "lora": self.lora, "train": train}
        )


def _fsdp(size: int, **keys: Any) -> dict[str, Any]:
    return {"mesh": {"fsdp": size}, "attention": "splash", "remat": "layer"} | keys


def _tp(fsdp: int, tp: int, **keys: Any) -> dict[str, Any]:
    return _fsdp(1) | {"mesh": {"fsdp": fsdp, "tp": tp}} | keys


BEST_ON_V6E = Case(
    note="the best for v6e", topology="v6e:2x4", rows=8, train=_fsdp(8, remat=["o", "down", "lora"]), options=ASYNC
)
EXPERTS = Case(
    note="experts", variant="gemma4-26b-a4b", topology="v6e:2x4", rows=8, train=_fsdp(8, remat="auto"), options=ASYNC
)
PETS = Case(
    note="recipes/pets_31b.yaml: an image in every row",
    topology="v6e:2x4",
    rows=16,
    length=512,
    lora={"rank": 64, "dropout": 0.05},
    train=_fsdp(8, remat="auto"),
    options=ASYNC,
    images={"images": 1, "soft_tokens": 288},
)
ALL_BUT_UP = ["lora", "down", "o", "attended", "v", "k", "q", "gate"]  # what auto comes to with rows of 640
CASES = {
    "31b-v5p": Case(note="the best for v5p", rows=4, train=_fsdp(4, remat="auto"), options=ASYNC),
    "31b-v5p-fused": Case(
        note="the same, gathers in the matmuls' programs", rows=4, train=_fsdp(4, remat="auto"), options=FUSED
    ),
    "31b-v5p-plain": Case(
        note="the same, train.optimizations off",
        rows=4,
        train=_fsdp(4, remat="auto", optimizations="off"),
        options=PLAIN,
    ),
    "31b-v6e": BEST_ON_V6E,
    "31b-v6e-48mib": dataclasses.replace(
        BEST_ON_V6E,
        note="the same, XLA's matmuls with 48 MiB of on-chip memory",
        options=ASYNC | {"xla_tpu_scoped_vmem_limit_kib": 49152},
    ),
    "31b-v6e-fused": dataclasses.replace(BEST_ON_V6E, note="the same, gathers in the matmuls' programs", options=FUSED),
    "31b-v6e-sync": dataclasses.replace(BEST_ON_V6E, note="the same, no collective overlapped", options=SYNC),
    "31b-v5p-published": Case(
        note="the published style", rows=1, train=_tp(1, 4, attention="dense"), real_share=PAPER_SHARE
    ),
    "31b-v5p-published-splash": Case(
        note="the published style, splash", rows=1, train=_tp(1, 4), real_share=PAPER_SHARE
    ),
    "31b-v5p-fsdp-dense": Case(note="fsdp, dense attention", rows=4, train=_fsdp(4, attention="dense")),
    "31b-v5p-fsdp": Case(note="fsdp, splash", rows=4, train=_fsdp(4)),
    "31b-v5p-async": Case(note="fsdp, splash, async all-gathers", rows=4, train=_fsdp(4), options=FUSED),
    "31b-v5p-async-8": Case(note="the same, 8 rows", rows=8, train=_fsdp(4), options=FUSED),
    "31b-v5p-8192": Case(note="fsdp, splash, rows of 8192", rows=4, length=8192, train=_fsdp(4)),
    "31b-v6e-tp": Case(note="v6e, fsdp 2 x tp 4, splash", topology="v6e:2x4", rows=2, train=_tp(2, 4)),
    "31b-v6e-held-out": Case(
        note="nothing in sizing was read from it",
        topology="v6e:2x4",
        rows=16,
        length=3072,
        train=_fsdp(8, remat=["lora", "down", "o"]),
        options=ASYNC,
    ),
    "31b-v6e-tp-held-out": Case(
        note="nothing in sizing was read from it",
        topology="v6e:2x4",
        rows=4,
        length=2048,
        train=_tp(4, 2),
        options=ASYNC,
    ),
    "26b-a4b-v6e": EXPERTS,
    "26b-a4b-v6e-32": dataclasses.replace(EXPERTS, note="the same, 32 rows", rows=32),
    "e4b-v6e": Case(
        note="per-layer inputs",
        variant="gemma4-e4b",
        topology="v6e:2x4",
        rows=8,
        train=_fsdp(8, remat="auto"),
        options=ASYNC,
    ),
    "31b-v6e-images": PETS,
    "31b-v6e-images-640": dataclasses.replace(
        PETS, note="rows of 640, which blocks of 512 pad", length=640, train=_fsdp(8, remat=ALL_BUT_UP)
    ),
    "31b-v6e-images-640-text": dataclasses.replace(
        PETS, note="rows as long, text alone", length=640, train=_fsdp(8, remat=ALL_BUT_UP), images={}
    ),
    "e4b-v6e-images-640": dataclasses.replace(PETS, note="E4B, rows of 640", variant="gemma4-e4b", length=640),
    "31b-32k": Case(
        note="one row of 32 K, its positions over the chips",
        rows=1,
        length=32768,
        train=_fsdp(1, mesh={"sequence": 4}),
        options=ASYNC,
    ),
    "31b-128k": Case(
        note="one row of 128 K, its positions over the chips",
        topology="v5p:2x2x4",
        rows=1,
        length=131072,
        train=_fsdp(1, mesh={"sequence": 16}),
        options=ASYNC,
    ),
}


def record_of(name: str, folder: Path, built: dict[str, Any]) -> dict[str, Any]:
    """The record of a case that was compiled into the folder."""
    case = CASES[name]
    costs = walk(
        (folder / "step.hlo").read_text(), case.chip, coordinates=[tuple(each) for each in built["coordinates"]]
    )
    return {
        "schema_version": 1,
        "case": name,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "versions": {package: version(package) for package in ("jax", "flax", "qwix", "optax", "libtpu")},
        "machine": host_info().model_dump(),
        "settings": dataclasses.asdict(case),
        "remat": built["remat"],
        "memory_per_chip": _memory(case.chip, built),
        **_times(case, costs, chips=len(built["coordinates"])),
        "compile": {key: round(built[key], 1) for key in ("trace_cpu_s", "compile_cpu_s")}
        | {key: built[key] for key in ("peak_rss_bytes", "code_bytes", "lowered_sha256")},
        "assumptions": _assumptions(case.chip),
    }


def _memory(chip: Chip, built: dict[str, Any]) -> dict[str, Any]:
    keys = ("argument_bytes", "output_bytes", "temporary_bytes", "alias_bytes", "peak_bytes", "host_bytes")
    held = built["argument_bytes"] + built["temporary_bytes"]
    return {key: built[key] for key in keys} | {
        "arguments_and_temporaries_gib": round(held / GIB, 2),
        "peak_gib": round(built["peak_bytes"] / GIB, 2),
        "hbm_gib": round(chip.hbm_bytes / GIB, 2),
        "fits": built["peak_bytes"] <= chip.hbm_bytes,
        "arguments_and_temporaries_fit": held <= chip.hbm_bytes,
    }


def model_flops(work: StepCost) -> float:
    """FLOPs that one step needs whatever it recomputes, for MFU: nothing is spent on gradients of the frozen base.

    A token and frozen weight 2 forward and 2 backward, an adapter's 2 more; a pair of query and key 4 forward and 8
    backward for each of the head's dimensions. Rows are taken as one document each, their images embedded as often as
    they are.
    """
    per_token = 4 * (work.layer_matmul_parameters + work.head_parameters) + 6 * work.text_adapters
    attention = 3 * forward_attention_flops(work.variant, work.length)
    embedding = work.images.row_flops if work.images else 0.0
    return float(work.tokens * per_token + work.rows * (attention + embedding))


def most_expensive(costs: Costs, count: int) -> list[Operation]:
    return sorted(costs.operations, key=lambda each: -each.exposed_s)[:count]


def _times(case: Case, costs: Costs, *, chips: int) -> dict[str, Any]:
    steps = {
        "collectives_hidden": costs.step_low_s,
        "as_scheduled": costs.step_high_s,
        "collectives_exposed": costs.step_serial_s,
    }
    work = step_cost(case.recipe, find_variant(case.variant), images=case.room)
    flops, tokens = model_flops(work), case.rows * case.length
    peak = chips * case.chip.flops_per_s
    return {
        "step_s": {name: round(seconds, 4) for name, seconds in steps.items()},
        "real_tokens_per_s": {name: round(case.real_share * tokens / seconds) for name, seconds in steps.items()},
        "positions_per_s": {name: round(tokens / seconds) for name, seconds in steps.items()},
        "mfu": {name: round(flops / seconds / peak, 4) for name, seconds in steps.items()},
        "seconds": {kind: round(costs.seconds(kind), 4) for kind in KINDS if kind != "collective"}
        | {
            "collectives_exposed": round(costs.seconds("collective"), 4),
            "collectives_total": round(costs.collectives_busy_s, 4),
        },
        "vector_by_xla_cycles_s": round(sum(each.cycles_s for each in costs.operations if each.kind == "vector"), 4),
        "tflop_per_chip": {
            "model": round(flops / chips / 1e12, 2),
            "matmul": round(costs.flops("matmul") / 1e12, 2),
            "kernel": round(costs.flops("kernel") / 1e12, 2),
        },
        "matmul_share_of_peak": round(costs.flops("matmul") / case.chip.flops_per_s / costs.seconds("matmul"), 3),
        "unpriced": list(costs.unpriced),
        "most_expensive": [
            {
                "name": each.name,
                "kind": each.kind,
                "count": each.count,
                "exposed_s": round(each.exposed_s, 5),
                "busy_s": round(each.busy_s, 5),
                "tflop": round(each.flops / 1e12, 3),
                "bytes": int(each.bytes),
                "result": each.result,
                "op_name": each.op_name,
            }
            for each in most_expensive(costs, 30)
        ],
    }


def _assumptions(chip: Chip) -> list[str]:
    return [
        "memory: XLA reserves the peak, arguments and preallocated temporaries; its other count of temporaries is "
        "larger",
        f"matmuls: XLA's estimated cycles at {(chip.clock_hz or 0) / 1e9} GHz, at least their bytes / bandwidth",
        f"everything else: bytes / {chip.hbm_bytes_per_s / 1e9:.0f} GB/s, arrays in on-chip memory free",
        f"Mosaic kernels: FLOPs of the blocks that their masks visit at {KERNEL_SHARE:.0%} of the peak",
        f"collectives: {(chip.link_bytes_per_s or 0) / 1e9:.0f} GB/s over each link that the worst placed chip of a "
        "group has, no latency",
        f"offload: {HOST_BYTES_PER_S / 1e9:.0f} GB/s to the host",
        "as_scheduled: asynchronous collectives cost what their end waits for, synchronous ones all; the other two are "
        "the bounds",
        "gathers of the sparse cores need no help; a ring that the core passes on goes on in programs that look after "
        "it, at any moment",
        f"real tokens: packed rows are full; the published style's are {PAPER_SHARE:.0%}",
    ]


def run_case(name: str, *, keep: Path | None, err: Console) -> dict[str, Any]:
    """The case's record, written; or, where XLA refuses it, a record of the error."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if keep is None else keep / name
        folder.mkdir(parents=True, exist_ok=True)
        err.print(f"{name}: {case.note} ...")
        try:
            built = compile_in_child(
                case.recipe, folder, topology=case.topology, options=case.options, images=case.room
            )
            record = record_of(name, folder, built)
        except MachineError as error:
            record = {"schema_version": 1, "case": name, "settings": dataclasses.asdict(case), "error": str(error)}
            err.print(f"{name}: {error}")
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    heads = (
        "case",
        "GiB held",
        "GiB peak",
        "matmul",
        "kernel",
        "vector",
        "copy",
        "coll. exposed",
        "of",
        "step ms",
        "real tok/s",
        "MFU",
        "CPU-s",
        "GB",
    )
    table = Table(*heads, box=None, header_style="bold")
    for record in records:
        if "error" in record:
            table.add_row(record["case"], record["error"][:60])
            continue
        memory, seconds, step, built = record["memory_per_chip"], record["seconds"], record["step_s"], record["compile"]
        kinds = ("matmul", "kernel", "vector", "copy", "collectives_exposed", "collectives_total")
        table.add_row(
            record["case"],
            f"{memory['arguments_and_temporaries_gib']:.1f}" + ("" if memory["arguments_and_temporaries_fit"] else "!"),
            f"{memory['peak_gib']:.1f}" + ("" if memory["fits"] else "!"),
            *(f"{1e3 * seconds[kind]:.0f}" for kind in kinds),
            f"{1e3 * step['collectives_hidden']:.0f}-{1e3 * step['as_scheduled']:.0f}",
            f"{record['real_tokens_per_s']['as_scheduled']:,}",
            f"{record['mfu']['as_scheduled']:.0%}",
            f"{built['trace_cpu_s'] + built['compile_cpu_s']:.0f}",
            f"{built['peak_rss_bytes'] / 1e9:.1f}",
        )
    console.print(table)


def print_costs(costs: Costs, *, rows: int) -> None:
    console = Console(width=170)
    console.print(
        f"{costs.chip}: step {1e3 * costs.step_low_s:.0f} ms with collectives hidden, {1e3 * costs.step_high_s:.0f} as "
        "scheduled, "
        f"{1e3 * costs.step_serial_s:.0f} with all exposed ({1e3 * costs.collectives_busy_s:.0f} in all)"
    )
    console.print(", ".join(f"{kind} {1e3 * costs.seconds(kind):.1f} ms" for kind in KINDS))
    console.print(
        f"per chip: matmuls {costs.flops('matmul') / 1e12:.2f} TFLOP, kernels {costs.flops('kernel') / 1e12:.2f} TFLOP"
    )
    for name in costs.unpriced:
        console.print(f"not priced: {name}")
    table = Table("kind", "name", "runs", "exposed ms", "busy ms", "TFLOP", "GB", "result", "from", box=None)
    for each in most_expensive(costs, rows):
        cells = (
            f"{1e3 * each.exposed_s:.2f}",
            f"{1e3 * each.busy_s:.2f}",
            f"{each.flops / 1e12:.3f}",
            f"{each.bytes / 1e9:.2f}",
        )
        table.add_row(
            each.kind, each.name[:40], str(each.count), *cells, each.result[:36], each.op_name[-50:], style=None
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", action="append", choices=[*CASES], metavar="NAME", help=f"one of: {', '.join(CASES)}; default: all"
    )
    parser.add_argument("--json", action="store_true", help="print the records instead of a table")
    parser.add_argument(
        "--dump-hlo", type=Path, metavar="DIR", help="keep NAME/step.hlo, the compiled text, and step.json, its memory"
    )
    parser.add_argument(
        "--walk",
        type=Path,
        metavar="FILE.hlo",
        help="print the costs of a compiled text, with the step.json beside it if any",
    )
    parser.add_argument("--chip", default="v5p", help="the chip that --walk takes it to run on")
    parser.add_argument("--top", type=int, default=30, help="how many of the most expensive operations --walk prints")
    options = parser.parse_args()
    try:
        _run(options)
    except GemsmithError as error:
        sys.exit(_one_line(error))


def _one_line(error: GemsmithError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def _run(options: argparse.Namespace) -> None:
    if options.walk:
        beside = options.walk.with_suffix(".json")
        coordinates = [tuple(each) for each in json.loads(beside.read_text())["coordinates"]] if beside.exists() else []
        print_costs(
            walk(options.walk.read_text(), load_catalog().chips[options.chip], coordinates=coordinates),
            rows=options.top,
        )
        return
    check_compiler()
    err = Console(stderr=True, width=170)
    records = [
        run_case(name, keep=options.dump_hlo, err=err)
        for name in options.case or (["e4b-v6e"] if short.SHORT else CASES)
    ]
    if options.json:
        print(json.dumps(records[0] if len(records) == 1 else records, indent=1))
    print_table(records, err if options.json else Console(width=170))
    if any("error" in record for record in records):
        sys.exit(1)


if __name__ == "__main__":
    main()
