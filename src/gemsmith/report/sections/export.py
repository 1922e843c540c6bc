"""What was exported, and the proof that it is right."""

from typing import Any

from gemsmith.report.findings import Findings, count_checks
from gemsmith.run import Run


def make(_run: Run, findings: Findings) -> dict[str, Any]:
    """How many checks passed, in words."""
    return {"checks": count_checks(findings.verify) if findings.verify else None}
