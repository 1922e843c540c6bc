from pathlib import Path

from gemsmith.runs.eval_records import EvalRecord

OLD = Path(__file__).parents[2] / "benchmarks" / "records" / "demo" / "eval.json"


def test_a_record_of_an_earlier_version_opens_with_what_it_does_not_say_left_open() -> None:
    record = EvalRecord.model_validate_json(OLD.read_text())
    assert record.base.n == record.tuned.n > 0
    if '"tasks"' not in OLD.read_text():
        assert (record.tasks, record.server, record.tuned.others) == ((), None, {})
