"""The chart of scores: one task without a name, several each under its own."""

import json

from gemsmith.report.charts import score_chart
from gemsmith.runs.eval_records import EvalRecord, ModelResult, TaskResult
from gemsmith.runs.run import read_record


def test_one_task_is_base_and_tuned_with_their_intervals(make_run):
    chart = score_chart(read_record(make_run(steps=2), EvalRecord))
    assert "base: 0.030 (0.014 to 0.064); tuned: 0.940 (0.898 to 0.965)" in chart.alt
    assert [words for _, _, words in json.loads(chart.points)] == [
        "base: 0.030 (0.014 to 0.064)",
        "tuned: 0.940 (0.898 to 0.965)",
    ]
    assert "0.940  (0.898–0.965)" in chart.svg


def test_several_tasks_stand_under_their_names(make_run):
    record = read_record(make_run(steps=2), EvalRecord)
    model = ModelResult(score=record.tuned, answers=200)
    task = TaskResult.model_construct(task="one", base=model, tuned=model)
    chart = score_chart(record.model_copy(update={"tasks": (task, task.model_copy(update={"task": "x" * 60}))}))
    assert "one, base: 0.940" in chart.alt and f"{'x' * 39}…, tuned" in chart.alt
    assert ">one<" in chart.svg and f">{'x' * 39}…<" in chart.svg
