"""What the terminal shows of an evaluation: a line a model, the comparison, and a table of the questions."""

from collections.abc import Mapping

from rich.table import Table

from gemsmith.eval_records import EvalRecord, LabelsResult, ModelResult, ProblemScore, TaskResult
from gemsmith.evals.questions import OpenTask
from gemsmith.evals.results import model_result
from gemsmith.evals.sampling import Answers
from gemsmith.terminal import open_console


def print_scores(task: OpenTask, role: str, answers: Answers) -> None:
    """Prints a model's score on a task as soon as it is there."""
    open_console().print(
        describe_scores(model_result(task, answers), role if task.held_out else f"{task.name}: {role}")
    )


def describe_scores(found: ModelResult, label: str) -> str:
    """eval: tuned: 75.0% right (…), or eval: verilog: tuned: pass@1 64.1% [57.0%, 71.0%], pass@5 …"""
    score = found.score
    cut = f", {score.cut} cut at the limit of tokens" if score.cut else ""
    failed = f", no answer to {sum(score.failed.values())}" if score.failed else ""
    unscored = f", no verdict on {sum(score.unscored.values())}" if score.unscored else ""
    if not found.problems:
        interval = f"{score.low:.1%} to {score.high:.1%}, n = {score.n}"
        return f"eval: {label}: {score.score:.1%} right ({interval}{cut}{failed}{unscored})"
    passes = ", ".join(
        f"pass@{each.k} {each.score:.1%} (95 % {each.low:.1%} to {each.high:.1%})" for each in found.pass_at
    )
    return f"eval: {label}: {passes} over {score.n} problems, {found.answers} answers{cut}{failed}{unscored}"


def print_comparisons(record: EvalRecord, *, table: bool = False) -> None:
    """Prints of each task whether the two models differ, and with `table` its questions side by side."""
    console = open_console()
    for result in record.tasks:
        if table and result.tuned.problems:
            console.print(problem_table(result))
        if result.left_out:
            left = f"{len(result.left_out)} question{'s' * (len(result.left_out) != 1)}"
            console.print(f"{result.task}: {left} left out, since {result.judged_by} cannot judge them")
        console.print(f"{result.task}: {result.difference.summary}")
        if result.labels is not None:
            console.print(f"{result.task}: {describe_labels(result.labels)}")


def describe_labels(found: LabelsResult) -> str:
    """macro-F1 0.31 → 0.82 (+0.51, 95 % +0.40 to +0.60) over 10 labels; no label: 40.0% → 0.0% of the answers"""
    base, tuned, change = found.base, found.tuned, found.macro_f1_difference
    return (
        f"macro-F1 {base.macro_f1.value:.2f} → {tuned.macro_f1.value:.2f} ({change.value:+.2f}, 95 % {change.low:+.2f} "
        f"to {change.high:+.2f}) over {len(found.labels)} labels; no label: {base.unknown.value:.1%} → "
        f"{tuned.unknown.value:.1%} of the answers"
    )


def problem_table(result: TaskResult) -> Table:
    """A line a question: how many answers of each model passed, and why the others did not."""
    table = Table("problem", "base", "tuned", "not passed, base", "not passed, tuned", box=None, header_style="bold")
    for base, tuned in zip(result.base.problems, result.tuned.problems, strict=True):
        counts = [f"{each.passed} of {each.samples}" for each in (base, tuned)]
        table.add_row(base.name, *counts, *(describe_reasons(each) for each in (base, tuned)))
    for name, why in result.left_out.items():
        table.add_row(name, "", "", "left out", why)
    return table


def describe_reasons(problem: ProblemScore) -> str:
    """3 wrong output, 1 timeout."""
    reasons: Mapping[str, int] = problem.reasons
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items())
