"""Export and verification."""

from gemsmith.analysis.summary import read_findings
from gemsmith.report import sections as export


def test_checks_are_counted_in_words(make_run):
    run = make_run(steps=2, verified=False)
    assert export.make_export(read_findings(run)) == {"checks": "3 passed, 1 failed"}
    none = make_run("none", steps=2, without=("verify",))
    assert export.make_export(read_findings(none)) == {"checks": None}
