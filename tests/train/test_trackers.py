"""W&B, MLflow and Trackio, by modules that stand in for them and write down what they are asked."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from gemsmith.errors import MachineError
from gemsmith.runs.run import find_run, is_up_to_date, stage_keys
from gemsmith.train.loop import TrainSession
from gemsmith.train.stage import check_training, train

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, at import

TRACKERS = ("wandb", "mlflow", "trackio")
EVAL = {"eval": {"task": "verilog", "rows": 2, "split": "held-out"}}


class Asked:
    """What the modules were asked, in order, and the step at which one of them breaks."""

    def __init__(self):
        self.opened, self.logged, self.ended, self.breaks = [], {name: {} for name in TRACKERS}, [], None

    def log(self, tracker, values, step):
        if self.breaks == (tracker, step):
            raise ConnectionError("no route\nto host")
        for name, value in values.items():
            self.logged[tracker].setdefault(name, {})[step] = value


def like_wandb(asked, tracker):
    """wandb.init, log and finish; Trackio's are the same, without an id."""

    def init(*, project, name, config, resume, **named):
        print("a banner")
        assert resume == "allow" and config["lora.rank"] == 4 and (tracker == "trackio" or named["id"] == name)
        asked.opened.append((tracker, project, name))

    def log(values, *, step):
        asked.log(tracker, values, step)

    def table(*, columns, data):
        return [dict(zip(columns, row, strict=True)) for row in data]

    return {"init": init, "log": log, "Table": table, "finish": lambda: asked.ended.append(tracker)}


def like_mlflow(asked):
    def start_run(*, run_id=None, run_name=None):
        assert (run_id is None) != (run_name is None)
        asked.opened.append(("mlflow", run_id))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "an id"))

    return {
        "set_experiment": lambda name: asked.opened.append(("experiment", name)),
        "start_run": start_run,
        "log_params": lambda values: asked.opened.append(("params", values["lora.rank"])),
        "log_metrics": lambda values, *, step: asked.log("mlflow", values, step),
        "log_text": lambda text, file: asked.log("mlflow", {file: text}, 0),
        "end_run": lambda: asked.ended.append("mlflow"),
    }


@pytest.fixture
def asked(monkeypatch):
    """Puts the modules in place."""
    for name in ("MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    found = Asked()
    for name, functions in (
        ("mlflow", like_mlflow(found)),
        *((name, like_wandb(found, name)) for name in ("wandb", "trackio")),
    ):
        module = ModuleType(name)
        vars(module).update(functions, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_each_has_every_step_and_a_run_that_resumes_is_the_same_one(prepared_run, asked, monkeypatch, capfd):
    keys = {"backend": "trl", "eval_steps": 3, "max_steps": 4, "report_to": ["tensorboard", *TRACKERS]}
    keys["sample_answers"] = 2
    run = prepared_run(data=EVAL, train=keys)
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    plan = TrainSession.plan

    def stopping(self, number):
        if number == 4:
            raise KeyboardInterrupt
        return plan(self, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainSession, "plan", stopping)
        train(run)
    record = train(run)
    name = (run.logs / "wandb.txt").read_text().strip()
    assert name.startswith("run-") and (run.logs / "mlflow.txt").read_text() == "an id\n"
    trackio = (run.logs / "trackio.txt").read_text().strip()
    once = [("wandb", "gemsmith", name), ("experiment", "gemsmith")], [("trackio", "mine", trackio)]
    assert asked.opened == [
        *once[0], ("mlflow", None), ("params", 4), *once[1], *once[0], ("mlflow", "an id"), *once[1]
    ]  # fmt: skip
    assert asked.ended == [*reversed(TRACKERS)] * 2
    expected = {step.step: step.loss for step in record.steps}
    for tracker in TRACKERS:
        found = asked.logged[tracker]
        assert found["train/loss"] == expected and set(found["train/grad_norm"]) == {1, 2, 3, 4}
        assert found["eval/loss"] == {one.step: one.loss for one in record.evaluations}
    answers = {one.step: [answer.model_dump() for answer in one.answers] for one in record.evaluations}
    assert {*answers} == {3, 4} and all(len(each) == 2 and each[0]["expected"] for each in answers.values())
    assert asked.logged["wandb"]["eval/answers"] == asked.logged["trackio"]["eval/answers"] == answers
    for step, found in answers.items():
        text = asked.logged["mlflow"][f"eval/answers_{step:09}.md"][0]
        assert all(line in text for answer in found for part in answer.values() for line in part.splitlines())
    assert record.warnings == () and "a banner" not in capfd.readouterr().out
    assert list(run.tensorboard.iterdir())


def test_one_that_breaks_on_the_way_does_not_end_training_and_is_told(prepared_run, asked, capsys):
    asked.breaks = ("mlflow", 3)
    run = prepared_run(train={"backend": "trl", "max_steps": 4, "report_to": TRACKERS})
    record = train(run)
    assert len(record.steps) == 4 and set(asked.logged["wandb"]["train/loss"]) == {1, 2, 3, 4}
    assert record.warnings == ("train.report_to: mlflow has nothing from step 3 on: no route",)
    assert capsys.readouterr().err.count(record.warnings[0]) == 1
    assert not run.tensorboard.exists()


def test_one_that_does_not_start_is_one_line_before_the_first_step(prepared_run, asked, monkeypatch):
    def refused(**_):
        raise RuntimeError("no key; call wandb login")

    monkeypatch.setattr(sys.modules["wandb"], "init", refused)
    run = prepared_run(train={"backend": "trl", "report_to": ["wandb"]})
    with pytest.raises(MachineError) as error:
        train(run)
    assert str(error.value) == (
        "train.report_to: wandb does not start (no key; call wandb login); mend it, or train without: gemsmith train "
        f"{run.path} --set train.report_to=[tensorboard]"
    )
    assert not (run.logs / "train_steps.jsonl").exists() and not (run.logs / "wandb.txt").exists()


def test_those_that_are_not_installed_are_told_with_their_extras_and_may_be_left_out_later(prepared_run, gemsmith):
    run = prepared_run(model="custom", train={"backend": "trl", "max_steps": 2, "report_to": ["trackio", "mlflow"]})
    expected = (
        "train.report_to: trackio needs trackio, train.report_to: mlflow needs mlflow, which are not installed; "
        "run: pip install 'gemsmith[trackio,mlflow]'"
    )
    with pytest.raises(MachineError) as error:
        check_training(run)
    assert str(error.value) == expected
    assert gemsmith("train", run.path)[0] == 2
    assert gemsmith("train", run.path, "--set", "train.report_to=[tensorboard]")[0] == 0
    assert gemsmith("train", run.path, "--set", "train.report_to=[]")[0] == 0
    recipe = find_run(run.path)
    assert recipe.train.report_to == () and is_up_to_date(run, "train")
    assert "train.report_to" not in stage_keys(recipe, "train")
