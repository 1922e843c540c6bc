"""What the terminal says of an evaluation."""

import pytest

from gemsmith.evals.metrics import compare_paired
from gemsmith.evals.results import describe_scores, print_comparisons, problem_table
from gemsmith.runs.eval_records import EvalRecord, ModelResult, PassAt, ProblemScore, Score, TaskResult


def model(*passed: int) -> ModelResult:
    problems = tuple(
        ProblemScore(name=f"Prob{n}", samples=5, passed=count, reasons={"timeout": 5 - count} if count < 5 else {})
        for n, count in enumerate(passed, 1)
    )
    share = sum(passed) / len(passed) / 5
    return ModelResult(
        score=Score(score=share, low=0.1, high=0.9, n=len(passed), cut=2, failed={"http 500": 1}),
        pass_at=(PassAt(k=1, score=share, low=0.1, high=0.9),),
        problems=problems,
        answers=5 * len(passed),
    )


@pytest.fixture
def result() -> TaskResult:
    base, tuned = model(0, 5, 1), model(5, 5, 2)
    return TaskResult(
        task="verilog",
        samples=5,
        temperature=0.8,
        top_p=0.95,
        seed=0,
        max_tokens=9,
        questions_sha256="0",
        left_out={"Prob9": "its own reference does not pass"},
        judged_by="Icarus Verilog 11.0",
        base=base,
        tuned=tuned,
        difference=compare_paired([0, 1, 0.2], [1, 1, 0.4]),
    )


def test_a_models_scores_are_a_line_with_what_went_wrong():
    assert describe_scores(model(5, 0), "verilog: tuned") == (
        "eval: verilog: tuned: pass@1 50.0% (95 % 10.0% to 90.0%) over 2 problems, 10 answers, 2 cut at the limit of "
        "tokens, no answer to 1"
    )
    rows = ModelResult(score=Score(score=0.5, low=0.2, high=0.8, n=4), answers=4)
    assert describe_scores(rows, "base") == "eval: base: 50.0% right (20.0% to 80.0%, n = 4)"


def test_the_table_has_both_models_side_by_side_and_what_was_left_out(result):
    table = problem_table(result)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows == [
        ("Prob1", "0 of 5", "5 of 5", "5 timeout", ""),
        ("Prob2", "5 of 5", "5 of 5", "", ""),
        ("Prob3", "1 of 5", "2 of 5", "4 timeout", "3 timeout"),
        ("Prob9", "", "", "left out", "its own reference does not pass"),
    ]


def test_the_comparison_is_said_and_the_table_only_where_it_is_asked_for(result, capsys):
    record = EvalRecord.model_construct(tasks=(result,))
    print_comparisons(record)
    said = capsys.readouterr().err
    assert "verilog: This does not tell the tuned model from the base: 80.0 % against 40.0 %" in said
    assert "1 question left out, since Icarus Verilog 11.0 cannot judge them" in said and "Prob1" not in said
    print_comparisons(record, table=True)
    assert "Prob1" in capsys.readouterr().err
