"""What plans come to, number by number: no change of a formula, a price or a published figure goes unseen.

That is of gemsmith.hardware.model.memory, gemsmith.hardware.model.step_time, gemsmith.hardware.model.work,
gemsmith.hardware.model.serving and gemsmith.hardware.model.limits, as gemsmith.plan puts them together.
"""

import json
from pathlib import Path

import pytest

from gemsmith.plan.stage import plan_only
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.plan_records import PlanRecord
from support.cases import each

GOLDEN = Path(__file__).parent / "golden.json"
MACHINES = ("v5p-8", "v6e-8", "v6e-16", "8xh100", "cloud-run-20")
IMAGES = {"train": "pets", "format": "image-folder", "prompt": "Which?"}
CASES = {
    "E2B": {"model": "gemma4-e2b"},
    "E4B, all weights": {"model": "gemma4-e4b", "train": {"method": "full", "gradient_accumulation_steps": 2}},
    "12B, images": {"model": "gemma4-12b", "data": IMAGES},
    "26B-A4B, evaluated": {
        "model": "gemma4-26b-a4b",
        "data": {"eval": "y"},
        "train": {"max_steps": 500, "eval_steps": 50, "sample_answers": 3},
    },
    "31B, long rows": {"model": "gemma4-31b", "data": {"max_length": 32_768}, "bench": {"grid": "paper"}},
    "31B, TRL, nf4, images, tower": {
        "model": "gemma4-31b",
        "data": IMAGES,
        "lora": {"targets": ["q", "v", "vision"], "rank": 16},
        "train": {"backend": "trl", "dtype": "nf4", "global_batch_size": 4},
    },
}
WORDS = {"notes", "measured", "price", "price_spot", "price_doubts", "warnings", "why"}
"""What tests of their own hold."""


def numbers(record: PlanRecord) -> dict[str, dict]:
    """Of each machine all that is computed: its training, and its serving by length."""
    computed = record.model_dump(mode="json", exclude_defaults=True)
    rows = {plan["name"]: plan for plan in computed["machines"]}
    for load in computed["serving"]:
        rows[f"{load['machine']}, {load['input_tokens']} in"] = load
    return {name: {key: value for key, value in row.items() if key not in WORDS} for name, row in rows.items()}


def a_line_each(cases: dict[str, dict[str, dict]]) -> str:
    """As JSON, a row in a line."""
    text = {
        case: ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        for case, rows in cases.items()
    }
    return "{\n" + ",\n".join(f"{json.dumps(case)}: {{\n{rows}\n}}" for case, rows in text.items()) + "\n}\n"


@each("case", CASES)
def test_plans_are_what_they_were(case):
    """Wanted changes: delete the file, run this test twice, and read the difference."""
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    given = {"checkpoint": "x/y", "hardware": {"machines": MACHINES}, **CASES[case]}
    given["data"] = {"train": "x", **given.get("data", {})}
    found = numbers(plan_only(build_recipe(given)))
    if case not in kept:
        GOLDEN.write_text(a_line_each(kept | {case: found}))
        pytest.fail(f"{case} was written to {GOLDEN}; read it, and run the test again")
    assert found == kept[case]
