"""The report's HTML, from the records of a run: what stands above the sections, the sections, one file."""

import base64
import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from gemsmith.errors import MachineError
from gemsmith.report import numbers
from gemsmith.report.findings import Findings, find_notices, read_findings, total_s
from gemsmith.report.headline import headlines
from gemsmith.run import Run

_FOLDER = Path(__file__).parent
_FILTERS = (
    numbers.count,
    numbers.decimal,
    numbers.duration,
    numbers.fraction,
    numbers.memory,
    numbers.mesh,
    numbers.moment,
    numbers.p_value,
    numbers.percent,
    numbers.plain,
    numbers.price,
    numbers.rate,
    numbers.rough,
    numbers.short_hash,
    numbers.signed,
    numbers.size,
    numbers.usd,
)


def render_page(run: Run) -> str:
    """The whole page. Raises MachineError where matplotlib or Jinja is not installed."""
    environment = open_environment()
    from gemsmith.report.sections import SECTIONS

    findings = read_findings(run)
    environment.globals |= {"recipe": run.recipe, "found": findings}
    rendered = (
        (section, environment.get_template(f"sections/{section.id}.html").render(section.make(run, findings)))
        for section in SECTIONS
    )
    sections = [(section, html) for section, html in rendered if html.strip()]
    html = environment.get_template("page.html").render(sections=sections, **_frame(run, findings))
    return html.encode("utf-8", "replace").decode()


def open_environment() -> Any:
    """Jinja's environment of the pages. Raises MachineError where matplotlib or Jinja is not installed."""
    for name in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise MachineError(f"report: {name} is not installed; run: pip install 'gemsmith[report]'")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    environment.filters |= {function.__name__: function for function in _FILTERS}
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    # What a browser runs of a page is this one text, whatever the records hold.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {"span": numbers.span, "script": script, "script_sha256": digest}
    return environment


def _frame(run: Run, findings: Findings) -> dict[str, Any]:
    """What stands around the sections."""
    records = findings.records()
    return {
        "run_name": run.path.resolve().name,
        "model": findings.model(run.recipe),
        "stages": len(records),
        "started": min((record.origin.started for record in records.values()), default=None),
        "total_s": total_s(findings),
        "notices": find_notices(findings),
        "headlines": headlines(findings),
    }


def _printable(value: Any) -> Any:
    """Control characters as pictures, and those that turn the order of letters as their names.

    HTML forbids some of the first; the others would let a text show itself, or what follows it, as something that it is
    not.
    """
    if type(value) is not str:
        return value
    value = re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f]",
        lambda found: "\u2421" if found[0] == "\x7f" else chr(0x2400 + ord(found[0])),
        value,
    )
    return re.sub(r"[\u200e\u200f\u202a-\u202e\u2066-\u2069]", lambda found: f"[U+{ord(found[0]):04X}]", value)
