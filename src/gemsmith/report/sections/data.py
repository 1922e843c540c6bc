"""What was trained on: rows, tokens, packing, what was dropped and why, pictures, and what is held out too."""

from typing import Any

from gemsmith.records import DataRecord
from gemsmith.report import numbers
from gemsmith.report.findings import Findings
from gemsmith.run import Run


def make(_run: Run, findings: Findings) -> dict[str, Any]:
    """Shares of the positions, the longest document, rows that were read, and the contamination in words."""
    data = findings.data
    if data is None:
        return {"positions": [], "longest_tokens": 1, "rows_read": 0, "pictures": [], "shared": "", "shared_more": []}
    return {
        "positions": _positions(data),
        "longest_tokens": max((1, *data.length_percentiles.values())),
        "rows_read": data.rows + sum(data.dropped.values()),
        "pictures": _pictures(data),
        "shared": _shared(findings),
        "shared_more": _shared_more(data),
    }


def _positions(data: DataRecord) -> list[tuple[str, float, str]]:
    """What the positions of the packed rows hold, as shares of 1: name, share, colour."""
    if not data.tokens:
        return []
    supervised = data.packing_efficiency * data.supervised_tokens / data.tokens
    return [
        ("tokens in the loss", supervised, "s1"),
        ("prompt and template tokens", data.packing_efficiency - supervised, "s1-soft"),
        ("padding", 1 - data.packing_efficiency, "line-strong"),
    ]


def _pictures(data: DataRecord) -> list[tuple[str, str]]:
    """Facts of the pictures; none where there are none."""
    if not data.pictures:
        return []
    return [
        ("Pictures", numbers.count(data.pictures)),
        ("Soft tokens of pictures", f"{numbers.count(data.soft_tokens)} of the tokens"),
        ("Soft tokens a picture, mean", numbers.decimal(data.soft_tokens / data.pictures)),
        ("Patches of a row, at most", numbers.count(data.most_patches)),
    ]


def _shared(findings: Findings) -> str:
    """How many held-out rows are trained on too: what eval saw counts over what data saw, which is older."""
    scored = None if findings.eval is None else findings.eval.held_out_also_trained
    prepared = None if findings.data is None else findings.data.held_out_also_trained
    number = prepared if scored is None else scored
    if number is None:
        return "not told: no held-out rows were there to compare with"
    which = "that data.eval named" if scored is None else "that were scored"
    have = "has" if number <= 1 else "have"
    return f"{numbers.count(number) if number else 'none'} of the rows {which} {have} a prompt that is trained on"


def _shared_more(data: DataRecord) -> list[tuple[str, str]]:
    """What the data stage has compared of the held-out rows, and what nobody has."""
    found = data.held_out
    if found is None:
        return []
    rows = [
        (
            "Held out, prompt and answer trained on",
            f"{numbers.count(found.same_answer)} of {numbers.count(found.rows)} rows",
        )
    ]
    if found.same_picture is not None:
        picture = f"{numbers.count(found.same_picture)} of {numbers.count(found.rows)} rows"
        rows.append(("Held out, a picture of it trained on", picture))
    return [
        *rows,
        ("Held out and nearly trained on", "not looked for: prompts are compared whole, but for white space"),
    ]
