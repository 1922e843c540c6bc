"""The sections of the page, in order: a file of numbers and a template of the same name for each."""

from gemsmith.report.section import Section
from gemsmith.report.sections import about, bench, data, export, labels, plan, provenance, scores, serve, time, training

SECTIONS = (
    Section(id="about", title="About", make=about.make),
    Section(id="scores", title="Scores", make=scores.make),
    Section(id="labels", title="Labels", make=labels.make),
    Section(id="training", title="Training", make=training.make),
    Section(id="data", title="Data", make=data.make),
    Section(id="plan", title="Plan", make=plan.make),
    Section(id="export", title="Export", make=export.make),
    Section(id="serve", title="Server", make=serve.make),
    Section(id="bench", title="Load test", make=bench.make),
    Section(id="time", title="Time and cost", make=time.make),
    Section(id="provenance", title="Provenance", make=provenance.make),
)
"""To add one: its two files here, and a line in this table."""
