"""What each record was made from, the resolved recipe with its reasons, and the checks of the export."""

import json
import re
from typing import Any

from gemsmith.analysis.summary import RunRecords, count_checks
from gemsmith.runs.run import Run


def make_provenance(run: Run, findings: RunRecords) -> dict[str, Any]:
    """The records, and each line of the resolved recipe, cut in what it sets and why; none where the file is gone."""
    text = run.recipe_file.read_text(encoding="utf-8") if run.recipe_file.exists() else ""
    return {"records": findings.records(), "recipe_lines": [_cut_reason(line) for line in text.splitlines()]}


def _cut_reason(line: str) -> tuple[str, str]:
    """A line of the resolved recipe in two, after its value.

    >>> _cut_reason('  template: "a  # b"  # the checkpoint has one')
    ('  template: "a  # b"', '# the checkpoint has one')
    """
    key = re.match(r"\s*[\w-]+: ", line)
    if key is None:
        return line, ""
    try:
        _, end = json.JSONDecoder().raw_decode(line, key.end())
    except json.JSONDecodeError:
        return line, ""
    return line[:end], line[end:].strip()


def make_export(_run: Run, findings: RunRecords) -> dict[str, Any]:
    """How many checks passed, in words."""
    return {"checks": count_checks(findings.verify) if findings.verify else None}
