from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemsmith.bench.cell import Count, LoadSpec, read_cell
from gemsmith.bench.sweep import digest_cell, find_cell
from gemsmith.recipe.serving import Load
from gemsmith.runs.bench_records import Slo

LOAD = Load(input_tokens=16, output_tokens=16, request_rate=20.0)
ASK = LoadSpec(number=1, load=LOAD, count=Count(warmup=0, measured=12), seed=1)
FACTS = {"weights": "abc", "command": "--dtype float32"}


def digest(
    ask: LoadSpec = ASK, slo: Slo | None = None, facts: dict[str, str] = FACTS, client: str = "vllm 0.32"
) -> str:
    return digest_cell(ask, slo, facts, client)


def test_a_cell_is_found_again(tmp_path: Path, result: dict[str, Any]) -> None:
    cell, file = read_cell(ASK, result), tmp_path / "cell.json"
    assert find_cell(file) is None
    file.write_text(cell.model_dump_json(indent=1))
    assert find_cell(file) == cell


@pytest.mark.parametrize(
    "other",
    [
        {"ask": replace(ASK, load=replace(LOAD, request_rate=21.0))},
        {"ask": replace(ASK, load=replace(LOAD, max_concurrency=8))},
        {"ask": replace(ASK, count=Count(warmup=1, measured=11))},
        {"ask": replace(ASK, seed=2)},
        {"ask": replace(ASK, timeout_s=5)},
        {"slo": Slo(ttft_ms=100)},
        {"facts": FACTS | {"weights": "abd"}},
        {"facts": FACTS | {"command": "--dtype bfloat16"}},
        {"client": "vllm 0.33"},
    ],
    ids=str,
)
def test_whatever_makes_a_cells_numbers_is_in_its_digest(other: dict[str, Any]) -> None:
    assert digest(**other) != digest()


def test_a_cell_in_another_place_of_the_grid_is_the_same_cell() -> None:
    assert digest(replace(ASK, number=7)) == digest()


@pytest.mark.parametrize("damage", ["", "{", "{}", "null"])
def test_a_damaged_cell_is_measured_again(damage: str, tmp_path: Path) -> None:
    (tmp_path / "cell.json").write_text(damage)
    assert find_cell(tmp_path / "cell.json") is None
