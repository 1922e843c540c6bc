"""The first screen's four answers."""

import pytest

from gemsmith.analysis.summary import read_findings
from gemsmith.report.page import headlines
from gemsmith.runs.records import VerifyRecord
from gemsmith.runs.run import read_record, write_record
from gemsmith.runs.stages import STAGES


def answers(run):
    return [tile.answer for tile in headlines(read_findings(run))]


def test_each_question_has_its_answer_from_the_records(make_run):
    worked, good, fast, cost = headlines(read_findings(make_run()))
    assert (worked.answer, worked.mood) == ("✓ yes", "good")
    assert (good.before, good.answer, good.unit) == ("0.030", "0.940", "right")
    assert fast.answer == "45,546" and "TTFT p50 52.2 ms (512 in, 4 requests/s)" in fast.lines
    assert cost.estimated and cost.answer == "$4.50–7.20"
    assert "spent: not known, which of the plan’s machines trained is not told" in cost.lines


@pytest.mark.parametrize(
    ("how", "answer", "mood"),
    [
        ({"verified": False}, "✕ no", "bad"),
        ({"without": ("bench",)}, "! in part", "mild"),
        ({"without": tuple(STAGES)}, "– not begun", "mild"),
    ],
)
def test_what_went_wrong_or_is_missing_is_no_yes(make_run, how, answer, mood):
    worked = headlines(read_findings(make_run(steps=3, **how)))[0]
    assert (worked.answer, worked.mood) == (answer, mood)


def test_a_check_that_was_not_done_is_no_yes(make_run):
    run = make_run(steps=3)
    verify = read_record(run, VerifyRecord)
    checks = (verify.checks[0].model_copy(update={"passed": None}), *verify.checks[1:])
    write_record(run, verify.model_copy(update={"checks": checks}))
    assert answers(run)[0] == "! in part"


def test_a_run_without_records_has_no_numbers(make_run):
    assert answers(make_run(without=tuple(STAGES)))[1:] == [None, None, None]
