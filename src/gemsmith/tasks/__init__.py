"""Tasks, each in one file: its rows, the prompt in them, and its scorer; and the names that a recipe may give."""

from gemsmith.tasks.base import Classifier, Judges, MultipleChoiceScorer, Question, Scorer, SupportsOptions, Verdict
from gemsmith.tasks.registry import (
    GENERATORS,
    SCORERS,
    SOURCES,
    describe_tasks,
    find_generator,
    find_scorer,
    find_source,
    is_prompt_file,
    is_task_file,
)

__all__ = [
    "GENERATORS", "SCORERS", "SOURCES", "Classifier", "Judges", "MultipleChoiceScorer", "Question", "Scorer",
    "SupportsOptions", "Verdict", "describe_tasks", "find_generator", "find_scorer", "find_source", "is_prompt_file",
    "is_task_file",
]  # fmt: skip
