"""Tasks, each in one file: its rows, the prompt in them, and its scorer; and the names that a recipe may give."""

from gemsmith.tasks.registry import MADE, SCORERS, TASKS, describe_made, describe_scorers, find_row_maker, find_scorer
from gemsmith.tasks.task import Question, RowMaker, Scorer, Verdict

__all__ = [
    "MADE",
    "SCORERS",
    "TASKS",
    "Question",
    "RowMaker",
    "Scorer",
    "Verdict",
    "describe_made",
    "describe_scorers",
    "find_row_maker",
    "find_scorer",
]
