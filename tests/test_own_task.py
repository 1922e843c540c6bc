"""A task's file that a recipe names: run where it scores, hashed into what was made, and not run to plan."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemsmith.data.dataset import read_dataset
from gemsmith.errors import DataError, RecipeError
from gemsmith.evals.generate import Model, answer_all
from gemsmith.evals.stage import evaluate
from gemsmith.evals.tasks import open_tasks, read_questions
from gemsmith.recipe.load import load_recipe
from gemsmith.recipe.schema import GeneratedData
from gemsmith.runs.records import ServerFacts
from gemsmith.runs.run import Run, inputs_sha256, is_up_to_date
from gemsmith.serve.stage import Servers
from gemsmith.tasks.messages import text_of

EXAMPLE = Path(__file__).parents[1] / "examples" / "temperature.py"


@pytest.fixture
def own_run(exported_run: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """A run whose held-out rows and scorer are those of a copy of the example."""

    def make(**options: Any) -> Run:
        file = tmp_path / "my_task.py"
        file.write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
        held_out = {"task": str(file), "rows": 4, "split": "held-out"}
        return exported_run({"data": {"eval": held_out}, "eval": {"scorer": str(file), "options": options}})

    return make


def test_the_example_makes_rows_and_scores_them_and_a_changed_file_makes_eval_stale(
    own_run: Callable[..., Run], fake_vllm: Callable[..., Path], tmp_path: Path
) -> None:
    run = own_run(tolerance=0.5)
    rows = read_dataset(GeneratedData(task=str(EXAMPLE), rows=4, split="held-out"), seed=0).documents
    answers = [
        f"About {float(text_of(row.messages[-1])) + off} °F." for row, off in zip(rows, (0, 0.4, 0.6, 9), strict=True)
    ]
    fake_vllm(answers={text_of(row.messages[0]): answer for row, answer in zip(rows, answers, strict=True)})
    with Servers(run) as servers:
        record = evaluate(run, servers)
    assert (record.tuned.score, record.base.score) == (0.5, 0.0)
    assert len({record.provenance.inputs_sha256[key] for key in ("eval.scorer", "data.eval.task")}) == 1
    listed = [json.loads(line) for line in (run.logs / "eval_rows.jsonl").read_text().splitlines()]
    assert {row["base_reason"] for row in listed} == {"no number"}
    assert is_up_to_date(run, "eval")
    with (tmp_path / "my_task.py").open("a") as file:
        file.write("# changed\n")
    assert not is_up_to_date(run, "eval")
    (tmp_path / "my_task.py").unlink()
    assert inputs_sha256(run, "eval")["eval.scorer"] == "missing"


def test_an_option_stands_for_a_column_that_rows_lack(own_run: Callable[..., Run]) -> None:
    assert [question.columns for question in read_questions(own_run(tolerance=2))] == [{"tolerance": 2}] * 4


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, DataError, r"^my_task\.py held-out row 1: has no tolerance, which eval.scorer reads; add it, set "),
        ({"tolerance": "wide"}, DataError, r"^my_task\.py held-out row 1: tolerance must be a number of degrees"),
        (
            {"tolerance": 1, "tolerence": 2},
            RecipeError,
            r"^eval\.options\.tolerence: .* reads no tolerence \(did you mean tolerance\?\); allowed: tolerance$",
        ),
    ],
)
def test_options_that_the_scorer_cannot_use_are_one_line(
    own_run: Callable[..., Run], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        read_questions(own_run(**options))


def test_a_row_of_its_own_goes_before_the_option(exported_run: Callable[..., Run], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows: list[dict[str, str]] = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b", "pattern": "own"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = exported_run({"data": {"eval": str(file)}, "eval": {"scorer": "regex", "options": {"pattern": "all"}}})
    assert [question.columns["pattern"] for question in read_questions(run)] == ["all", "own"]


def test_a_file_is_named_relative_to_the_recipe_and_planning_does_not_run_it(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], gemsmith: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "mine.py").write_text("raise SystemExit('it was run')")
    recipe = folder / "my.yaml"
    recipe.write_text(
        f"checkpoint: {tiny_checkpoint('tiny-31b')}\n"
        "data: {train: {task: ./mine.py, rows: 5}, eval: {task: mine.py, rows: 5}, max_length: 64}\n"
        "eval: {scorer: ./mine.py}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_recipe(recipe).eval.scorer == str(folder / "mine.py")
    code, _, err = gemsmith("plan", recipe)
    assert code == 0 and "it was run" not in err and "running the code" not in err
    code, _, err = gemsmith("data", recipe)
    assert code == 2 and "mine.py cannot be loaded: SystemExit at line 1: it was run; mend it" in " ".join(err.split())


def test_choices_are_scored_by_the_likelihoods_that_the_server_gives(
    exported_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def likelihoods(server: Any, asked: Any, heard: Any, *, concurrency: int) -> None:
        from gemsmith.serve.client.chat import Reply

        logprobs = {"yes": -2.7, "no": -2.0, "certainly not": -4.0}
        for number, (_, choices) in asked.items():
            listed = [{"choice": each, "logprob": logprobs[each], "tokens": 1} for each in choices]
            heard(number, Reply(text=json.dumps(listed), cut=False))

    monkeypatch.setattr("gemsmith.evals.generate.ask_likelihoods", likelihoods)
    file = tmp_path / "rows.jsonl"
    rows = [("yes", ["yes", "no"]), ("no", ["yes", "no"]), ("certainly not", ["no", "certainly not"])]
    lines = [json.dumps({"prompt": f"{n}?", "response": right, "choices": of}) for n, (right, of) in enumerate(rows)]
    file.write_text("\n".join(lines))
    run = exported_run({"data": {"eval": str(file)}, "eval": {"scorer": "multiple-choice"}})
    (task,), _ = open_tasks(run)
    served = Model(role="tuned", digest=lambda _tokens: "d", start=_Served, stop=_refuse)
    answers = answer_all(run, task, served).all()
    assert [answer.right for answer in answers] == [False, True, False]
    assert [answer.others["length-normalized"] for answer in answers] == [True, False, True]
    again = answer_all(run, task, replace(served, start=_refuse)).all()
    assert again == answers, "they are kept, choices and all"


class _Served:
    model, facts = "demo", ServerFacts()


def _refuse() -> Any:
    raise AssertionError("no server is needed")
