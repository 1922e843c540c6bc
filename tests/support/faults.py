"""A plugin of pytest: marks the tests that tests/faults/faults.yaml names, and writes what came of them as a record.

pytest -m faults --faults-record=benchmarks/records/faults.json
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemsmith.runs.run import host_info, start_clock

FILE = Path(__file__).parents[1] / "faults" / "faults.yaml"
ROWS: dict[str, dict[str, Any]] = {
    row["fault"]: row for rows in yaml.safe_load(FILE.read_text(encoding="utf-8")).values() for row in rows
}
MARKS = {"tests": "faults", "long": "faults_long"}
"""A row's list of tests -> their marker, under which the record has them."""
PLACES = {
    test: (fault, mark) for fault, row in ROWS.items() for key, mark in MARKS.items() for test in row.get(key, [])
}
OUTCOMES = ("tried", "survived", "told", "lost", "silent", "skipped")


def name_of(nodeid: str) -> str:
    """As faults.yaml names a test: without its parameters and its class."""
    file, *_, name = nodeid.partition("[")[0].split("::")
    return f"{file}::{name}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-record", type=Path, help="the file to write what came of the tests of faults to")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if found := PLACES.get(name_of(item.nodeid)):
            item.add_marker(found[1])


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("faults_record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("faults_record")))


class Recorder:
    """Counts what comes of each test. A half of the record is written where every test of it was there."""

    def __init__(self, record: Path) -> None:
        self._record, self._clock = record, start_clock()
        self._counts: dict[str, dict[str, Counter[str]]] = {mark: {} for mark in MARKS.values()}
        self._names: set[str] = set()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = PLACES.get(name_of(report.nodeid))
        if found is None or report.nodeid in self._failed or (report.passed and report.when != "call"):
            return
        fault, mark = found
        counts, ends = self._counts[mark].setdefault(fault, Counter()), ROWS[fault]["ends"]
        self._names.add(name_of(report.nodeid))
        tries = dict(report.user_properties).get("tries", 1)
        if report.skipped:
            counts["skipped"] += 1
        elif report.passed:
            counts.update({"tried": tries, ends: tries})
        else:
            self._failed.add(report.nodeid)
            counts.update({"tried": 1, "lost" if ends == "survived" else "silent": 1})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        record = json.loads(self._record.read_text()) if self._record.exists() else {"schema_version": 1}
        for mark, counts in self._counts.items():
            missing = sorted({test for test, place in PLACES.items() if place[1] == mark} - self._names)
            if counts and missing:
                terminalreporter.write_line(f"{mark}: not recorded, {len(missing)} did not run, such as {missing[0]}")
            elif counts:
                rows = {fault: {name: each[name] for name in OUTCOMES} for fault, each in counts.items()}
                total = {name: sum(row[name] for row in rows.values()) for name in OUTCOMES}
                record[mark] = {
                    "when": self._clock.started,
                    "duration_s": round(self._clock.elapsed_s(), 1),
                    "machine": host_info().model_dump(),
                    "total": total,
                    "faults": rows,
                }
                terminalreporter.write_line(f"{mark}: {', '.join(f'{count} {name}' for name, count in total.items())}")
        self._record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
