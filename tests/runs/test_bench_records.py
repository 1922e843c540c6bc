import math
from pathlib import Path

from gemsmith.runs.bench_records import BenchCell, BenchRecord

OLD = Path(__file__).parents[2] / "benchmarks" / "records" / "demo" / "bench.json"


def test_a_record_of_an_earlier_version_opens_with_what_it_does_not_say_left_open() -> None:
    record = BenchRecord.model_validate_json(OLD.read_text())
    assert len(record.cells) == 6 and record.prefix_caching is False
    assert (record.slo, record.saturations, record.grid) == (None, (), "own")
    if "e2e_ms" not in OLD.read_text():
        assert all(cell.e2e_ms is None and cell.failures == {} and not cell.probe for cell in record.cells)


def test_an_infinite_rate_is_text_in_json_and_a_number_again() -> None:
    cell = BenchRecord.model_validate_json(OLD.read_text()).cells[0].model_copy(update={"request_rate": math.inf})
    assert '"request_rate":"Infinity"' in cell.model_dump_json()
    assert BenchCell.model_validate_json(cell.model_dump_json()) == cell
