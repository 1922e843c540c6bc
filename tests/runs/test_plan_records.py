from pathlib import Path

from gemsmith.runs.plan_records import PlanRecord

OLD = Path(__file__).parents[2] / "benchmarks" / "records" / "demo" / "plan.json"


def test_a_plan_of_an_earlier_version_opens_with_what_it_does_not_say_left_open() -> None:
    record = PlanRecord.model_validate_json(OLD.read_text())
    assert record.machines
    if '"serving"' not in OLD.read_text():
        assert record.serving == ()
        assert all(machine.compiled is None and machine.measured is None for machine in record.machines)
