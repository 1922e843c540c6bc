"""Several samples of each problem of verilog-eval, from a server that does what a test wants."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gemsmith.analysis.ratios import refused_scores
from gemsmith.analysis.sides import side_of_run
from gemsmith.errors import DataError, EngineError, MachineError
from gemsmith.evals.cache import ANSWERS, AnswerCache
from gemsmith.evals.generate import sample_seed
from gemsmith.evals.stage import evaluate
from gemsmith.evals.tasks import check_tasks, open_tasks
from gemsmith.recipe.schema import EvalTask
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.run import Run, is_up_to_date, read_record
from gemsmith.serve.stage import Servers
from gemsmith.system.sandbox import find_sandbox
from gemsmith.tasks.verilog.simulate import find_simulator
from support.hostile_server import chat

from ..tasks.verilog.conftest import PROMPT, REFERENCE, TESTBENCH

RIGHT = f"[BEGIN]{REFERENCE.replace('RefModule', 'TopModule')}[DONE]"
WRONG = RIGHT.replace("&", "|")
NONE = "I cannot."
NAMES = ("Prob001_and", "Prob002_and", "Prob003_and", "Prob004_broken")
SCORED, SAMPLES = 3, 2
ALL = SCORED * SAMPLES


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    try:
        find_simulator(), find_sandbox()
    except MachineError as error:
        pytest.skip(str(error))
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}_prompt.txt").write_text(f"{PROMPT} It is called {name}.")
        (folder / f"{name}_ref.sv").write_text(REFERENCE)
        (folder / f"{name}_test.sv").write_text(TESTBENCH + "module ;" * name.endswith("broken"))
    return folder


@pytest.fixture
def sampled(dataset: Path, fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]) -> Run:
    """A run whose only task is verilog."""
    fake_vllm()
    task = {"task": "verilog", "dataset": str(dataset), "samples": SAMPLES, "max_tokens": 50, "seed": 7}
    return exported_run({"data": {"eval": None}, "eval": {"tasks": [task], "concurrency": 2}})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemsmith.serve.client.batch.WAITS_S", (0.01, 0.01, 0.01, 0.01))


def evaluated(run: Run, hostile: Any) -> EvalRecord:
    with Servers(run, start=hostile.start, skip_verify_check=True) as servers:
        return evaluate(run, servers)


def problem_of(asked: dict[str, Any]) -> str:
    return next(name for name in NAMES if name in asked["messages"][-1]["content"])


def test_base_and_tuned_are_sampled_alike_and_each_problem_stands_in_the_record(sampled: Run, hostile: Any) -> None:
    def deed(asked: dict[str, Any]) -> Any:
        right = asked["model"] == "demo" and problem_of(asked) != "Prob003_and"
        return chat(RIGHT if right else WRONG if asked["model"] == "demo" else NONE, usage={"completion_tokens": 20})

    hostile.deed = deed
    record = evaluated(sampled, hostile)
    assert record == read_record(sampled, EvalRecord)
    (result,) = record.tasks
    assert (result.samples, result.temperature, result.top_p, result.seed, result.prompt) == (
        SAMPLES, 0.8, 0.95, 7, "official",
    )  # fmt: skip
    assert list(result.left_out) == ["Prob004_broken"] and result.sandbox is True
    assert [(each.name, each.samples, each.passed) for each in result.tuned.problems] == [
        ("Prob001_and", 2, 2), ("Prob002_and", 2, 2), ("Prob003_and", 2, 0),
    ]  # fmt: skip
    assert result.tuned.problems[2].reasons == {"wrong output": SAMPLES}
    assert [(each.k, each.score) for each in result.tuned.pass_at] == [(1, pytest.approx(2 / 3))]
    assert (record.scorer, record.base.score, record.tuned.score, record.tuned.n) == ("verilog", 0, 2 / 3, SCORED)
    assert (result.tuned.answers, result.tuned.mean_output_tokens, result.tuned.usage_missing) == (ALL, 20, 0)
    assert (result.difference.significant, result.difference.better) == (False, 2)
    assert any(notice.startswith("verilog: 1 of 4 questions are left out") for notice in record.warnings)
    assert [example["problem"] for example in record.examples] == list(NAMES[:SCORED])

    asked = {model: [each for each in hostile.asked if each["model"] == model] for model in ("demo", "demo-base")}
    assert len(hostile.asked) == 2 * ALL and "Prob004_broken" not in {problem_of(each) for each in hostile.asked}
    seeds = {model: Counter((problem_of(each), each["seed"]) for each in asked[model]) for model in asked}
    assert (
        seeds["demo"]
        == seeds["demo-base"]
        == Counter((name, sample_seed(7, name, sample)) for name in NAMES[:SCORED] for sample in range(SAMPLES))
    )
    assert len({each["seed"] for each in asked["demo"]}) == ALL
    assert {(each["temperature"], each["top_p"], each["max_tokens"]) for each in hostile.asked} == {(0.8, 0.95, 50)}
    assert hostile.asked[0]["messages"][0]["role"] == "system"


def test_a_second_start_asks_only_for_the_samples_that_are_missing(sampled: Run, hostile: Any) -> None:
    hostile.deed = lambda _asked: chat(NONE) if len(hostile.asked) <= 3 else (400, b"")
    with pytest.raises(EngineError, match=r"of 6 questions and samples.*Prob00\d_and sample \d: http 400"):
        evaluated(sampled, hostile)
    kept = len(AnswerCache(sampled.logs / ANSWERS).replies())
    assert 0 < kept <= 3
    hostile.forget()
    hostile.deed = lambda _asked: chat(NONE)
    record = evaluated(sampled, hostile)
    tuned = Counter((problem_of(each), each["seed"]) for each in hostile.asked if each["model"] == "demo")
    assert len(tuned) == tuned.total() == ALL - kept
    assert [each.samples for each in record.tasks[0].tuned.problems] == [SAMPLES] * SCORED
    assert record.tasks[0].tuned.answers == ALL


@pytest.mark.slow
def test_a_task_that_is_added_later_leaves_the_answers_of_the_others(sampled: Run, hostile: Any) -> None:
    hostile.deed = lambda _asked: chat(NONE)
    evaluated(sampled, hostile)
    hostile.forget()
    (task,) = sampled.recipe.eval.tasks
    tasks = (task, EvalTask(task="verilog", dataset=task.dataset, prompt="fenced", samples=1, temperature=0.0))
    recipe = sampled.recipe.model_copy(update={"eval": sampled.recipe.eval.model_copy(update={"tasks": tasks})})
    record = evaluated(dataclasses.replace(sampled, recipe=recipe), hostile)
    assert len(hostile.asked) == 2 * SCORED and {each["temperature"] for each in hostile.asked} == {0}
    assert [(result.prompt, result.samples) for result in record.tasks] == [("official", SAMPLES), ("fenced", 1)]
    assert {"questions of verilog 1", "questions of verilog 2"} <= record.provenance.inputs_sha256.keys()
    hostile.forget()
    evaluated(sampled, hostile)  # with the first alone, which is there too
    assert hostile.asked == []


def test_another_text_of_a_prompt_file_is_another_prompt_and_its_scores_are_not_compared(
    sampled: Run, hostile: Any, tmp_path: Path
) -> None:
    file, (task,), runs = tmp_path / "mine.txt", sampled.recipe.eval.tasks, list[EvalRecord]()
    settings = sampled.recipe.eval.model_copy(
        update={"tasks": (task.model_copy(update={"prompt": str(file), "samples": 1}),)}
    )
    run = dataclasses.replace(sampled, recipe=sampled.recipe.model_copy(update={"eval": settings}))
    for text in ("Mine: {question}", "Mine: {question}", "Other: {question}"):
        file.write_text(text)
        assert len(runs) < 2 or not is_up_to_date(run, "eval")
        runs.append(evaluated(run, hostile))
    first, again = runs[:2]
    assert [asked["messages"][0]["content"][:5] for asked in hostile.asked] == ["Mine:"] * 12 + ["Other"] * 6
    assert first.tasks[0].prompt == again.tasks[0].prompt == f"file {sha256(b'Mine: {question}').hexdigest()[:12]}"
    assert first.provenance.inputs_sha256["eval.tasks.0.prompt"] == sha256(b"Mine: {question}").hexdigest()
    ours, same, theirs = (side_of_run("a", "a", run.recipe, {"eval": each}) for each in runs)
    assert not refused_scores(ours, same)
    assert all("prompt file" in line and "not scored on the same" in line for line in refused_scores(ours, theirs))
    assert len(refused_scores(ours, theirs)) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"Write it.", "has no {question}; write it where"),
        (b"\xff{question}", "cannot be read"),
    ],
)
def test_a_prompt_file_that_cannot_be_asked_is_one_line_before_a_server_starts(
    sampled: Run, tmp_path: Path, content: bytes | None, said: str
) -> None:
    file, (task,) = tmp_path / "mine.txt", sampled.recipe.eval.tasks
    if content is not None:
        file.write_bytes(content)
    settings = sampled.recipe.eval.model_copy(update={"tasks": (task.model_copy(update={"prompt": str(file)}),)})
    run = dataclasses.replace(sampled, recipe=sampled.recipe.model_copy(update={"eval": settings}))
    for check in (check_tasks, open_tasks):
        with pytest.raises(DataError) as error:
            check(run)
        assert str(error.value).startswith(f"{file}: ") and said in str(error.value) and "\n" not in str(error.value)


def test_each_trouble_has_its_name_and_none_is_lost_or_counted_twice(sampled: Run, hostile: Any) -> None:
    troubles: dict[int, Any] = {1: (429, b"", {"Retry-After": "0"}), 2: (500, b""), 3: "cut", 5: (503, b"")}

    def deed(asked: dict[str, Any]) -> Any:
        number = len(hostile.asked)
        return troubles.get(number) or chat(NONE, usage={"completion_tokens": 9} if number % 2 else "none")

    hostile.deed = deed
    record = evaluated(sampled, hostile)
    result = record.tasks[0].tuned
    assert result.retries == {"cut off": 1, "http 429": 1, "http 500": 1, "http 503": 1}
    assert (result.answers, result.score.failed, result.score.score) == (ALL, {}, 0)
    assert 0 < result.usage_missing < ALL and result.mean_output_tokens == 9
    assert any("4 requests of the tuned model had to be sent again (1 cut off, 1 http 429" in each
               for each in record.warnings)  # fmt: skip
    assert len([each for each in hostile.asked if each["model"] == "demo"]) == ALL + 4


def test_a_model_that_solves_nothing_is_a_record_that_says_so(sampled: Run, hostile: Any) -> None:
    hostile.deed = lambda _asked: chat(NONE)
    record = evaluated(sampled, hostile)
    assert (record.tuned.score, record.base.score) == (0, 0)
    assert record.tasks[0].tuned.problems[0].reasons == {"no module": SAMPLES}
    assert any("Neither model has a right answer to any of 3 questions" in notice for notice in record.warnings)


def test_a_dataset_of_which_nothing_can_be_judged_is_one_line_before_a_server_starts(
    sampled: Run, hostile: Any, dataset: Path
) -> None:
    for name in NAMES[:SCORED]:
        (dataset / f"{name}_test.sv").write_text("module ;")
    with pytest.raises(MachineError, match=r"^eval: verilog: Icarus Verilog .* can judge none of 4 questions; Prob001"):
        evaluated(sampled, hostile)
    assert hostile.started == []
