"""Writes the README's measured table from a run's records, which it keeps under benchmarks/records/demo.

make demo && python scripts/readme_table.py runs/demo
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
DEMO, DEMOS = "demo", ("demo", "demo_images")
_RIGHT = {"verilog-exact": "exact matches", "labels": "right labels"}
README = ROOT / "README.md"
BEGIN, END = "<!-- table: scripts/readme_table.py -->\n", "<!-- end of table -->"


def make_table(folder: Path) -> str:
    """The table in Markdown, each number with a link to the record it is from."""
    records = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
    lines = ["| stage | what came out | time | record |", "|---|---|--:|---|"]
    for stage, text in _findings(records).items():
        duration_s = records[stage]["provenance"]["duration_s"]
        lines.append(
            f"| {stage} | {text} | {duration_s:.0f} s | [{stage}.json](benchmarks/records/{folder.name}/{stage}.json) |"
        )
    measured = records["train"]["provenance"]
    cores, memory_gib = measured["machine"]["cores"], measured["machine"]["memory_bytes"] / 2**30
    lines.append("")
    lines.append(
        f"Measured on {cores} CPU cores with {memory_gib:.0f} GiB on {measured['started'][:10]}; the plan is estimated."
    )
    return "\n".join(lines) + "\n"


def _findings(records: dict[str, Any]) -> dict[str, str]:
    plan, data, train, export = (records[stage] for stage in ("plan", "data", "train", "export"))
    verify, serve, bench, scores = (records[stage] for stage in ("verify", "serve", "bench", "eval"))
    first, last = train["steps"][0], train["steps"][-1]
    slow, fast = bench["cells"][0], bench["cells"][-1]
    fitting = [machine["name"] for machine in plan["machines"] if machine["fits"]]
    return {
        "plan": f"{plan['trained_parameters'] / 1e6:.2f} M of {plan['parameters'] / 1e6:.2f} M parameters trained; "
        f"fits {', '.join(fitting)}",
        "data": f"{data['rows']:,} rows in {data['packed_rows']:,} packed ones, {data['packing_efficiency']:.1%} full, "
        f"{data['supervised_tokens']:,} of {data['tokens']:,} tokens in the loss{_images(data)}",
        "train": f"{last['step']} steps, loss {first['loss']:.3f} → {last['loss']:.3f}, "
        f"{train['real_tokens_per_s']:,.0f} real tokens/s",
        "export": f"{export['merged_tensors']} tensors merged, {export['copied_tensors']} copied as bytes, and the "
        "PEFT adapter",
        "verify": f"{sum(check['passed'] is True for check in verify['checks'])} of {len(verify['checks'])} checks "
        "passed; "
        f"logits of merged and base + adapter {verify['logits_max_abs_difference']:.1e} apart at most",
        "serve": f"{serve['vllm']}, up after {serve['start_s']:.0f} s",
        "bench": f"{_cell(slow)}; {_cell(fast)}",
        "eval": f"{_RIGHT[scores['scorer']]} {_score(scores['base'])} → {_score(scores['tuned'])}, "
        f"n = {scores['tuned']['n']}",
    }


def _cell(cell: dict[str, Any]) -> str:
    return (
        f"{cell['input_tokens']} tokens in at {cell['request_rate']:g} a second: TTFT {cell['ttft_ms']['p50']:.0f} ms, "
        f"TPOT {cell['tpot_ms']['p50']:.1f} ms (p50), {cell['output_tokens_per_s']:.0f} output tokens/s"
    )


def _images(data: dict[str, Any]) -> str:
    return f"; {data['images']:,} images in {data['soft_tokens']:,} soft tokens" if data.get("images") else ""


def _score(score: dict[str, Any]) -> str:
    return f"{score['score']:.1%} [{score['low']:.1%}, {score['high']:.1%}]"


def main() -> None:
    run = Path(sys.argv[1])
    if run.name not in DEMOS:
        sys.exit(f"error: {run} was given; allowed: a run directory called {' or '.join(DEMOS)}")
    kept = RECORDS / run.name
    kept.mkdir(parents=True, exist_ok=True)
    for file in run.glob("*.json"):
        # Paths are told from the repository's folder: where that lies is nobody else's concern.
        text = file.read_text(encoding="utf-8").replace(f"{ROOT.resolve()}/", "")
        (kept / file.name).write_text(text, encoding="utf-8")
    if run.name != DEMO:
        return
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{make_table(kept)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
