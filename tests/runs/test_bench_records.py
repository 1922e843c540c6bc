import math
from pathlib import Path

from gemsmith.runs.bench_records import BenchCell, BenchRecord

DEMO = Path(__file__).parents[2] / "benchmarks" / "records" / "demo" / "bench.json"


def test_the_demos_record_opens() -> None:
    record = BenchRecord.model_validate_json(DEMO.read_text())
    assert len(record.cells) == 6 and record.prefix_caching is False
    assert (record.slo, record.saturations, record.grid) == (None, (), "own")


def test_an_infinite_rate_is_text_in_json_and_a_number_again() -> None:
    cell = BenchRecord.model_validate_json(DEMO.read_text()).cells[0].model_copy(update={"request_rate": math.inf})
    assert '"request_rate":"Infinity"' in cell.model_dump_json()
    assert BenchCell.model_validate_json(cell.model_dump_json()) == cell
