"""The sections of the page, in order: numbers from the records, and a template of the section's name."""

from gemsmith.report.sections import cost, evaluation, serving, training

SECTIONS = {
    "scores": ("Scores", evaluation.make_scores),
    "labels": ("Labels", evaluation.make_labels),
    "use": ("Use this model", serving.make_use),
    "training": ("Training", training.make_training),
    "data": ("Data", training.make_data),
    "about": ("About", training.make_about),
    "plan": ("Plan", cost.make_plan),
    "export": ("Export", training.make_export),
    "serve": ("Server", serving.make_serve),
    "bench": ("Load test", serving.make_bench),
    "time": ("Time and cost", cost.make_time),
    "provenance": ("Provenance", training.make_provenance),
}
"""Id -> title in the navigation, and what gives the names that `templates/<id>.html` shows, beside `recipe`, `found`
and the macros. A section whose template shows nothing is left out."""
