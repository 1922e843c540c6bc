import shutil
from pathlib import Path

import pytest

from gemsmith.errors import InputError, MachineError, RunError, Terminated
from gemsmith.launch.request import find_inputs
from gemsmith.launch.sync import complete_checkpoints
from gemsmith.launch.worker import run_on_worker
from gemsmith.pipeline import run_stage
from gemsmith.recipe.load import dump_recipe, with_values
from gemsmith.runs.resolve import resolve_file
from gemsmith.system.console import open_console
from gemsmith.system.storage import Bucket


@pytest.fixture
def launched_bucket(recipe, tmp_path):
    """A bucket as submit.sh leaves it, for the recipe of tiny-31b."""
    resolved, _ = resolve_file(recipe)
    root = f"file://{tmp_path}/store/my"
    found = find_inputs(resolved, root, mount=None)
    for local, remote in found.copies.items():
        shutil.copytree(local, remote.removeprefix("file://"))
    text = dump_recipe(with_values(resolved, found.placed), found.placed)
    (tmp_path / "store" / "my" / "launched" / "recipe.yaml").write_text(text)
    return root


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """What draws the report is imported in a second, so most tests do without; the runs whose report was drawn."""
    runs = []
    monkeypatch.setattr("gemsmith.report.page.report", lambda run: runs.append(run) or run.report.write_text("<html>"))
    return runs


def here(root, stages, run=run_stage):
    """On a machine of its own, where nothing is but what the bucket has."""
    folder = Path("work").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    return run_on_worker(root, folder, stages, run, open_console())


def test_stages_go_on_from_the_bucket_on_another_machine(launched_bucket, capfd):
    record = here(launched_bucket, ["plan", "data"]).path / "data.json"
    first = record.read_bytes()
    here(launched_bucket, ["plan", "data"])
    assert record.read_bytes() == first
    assert "complete in the bucket: data, plan" in capfd.readouterr().err


def test_the_report_is_in_the_bucket_once_the_stages_have_ended(launched_bucket, drawn):
    here(launched_bucket, ["plan"])
    assert Bucket(launched_bucket).read("run/report.html") == b"<html>" and len(drawn) == 1


def test_an_image_that_cannot_draw_a_report_says_so_and_ends_well(launched_bucket, monkeypatch, capfd):
    def lack(_run):
        raise ModuleNotFoundError("No module named 'matplotlib'")

    monkeypatch.setattr("gemsmith.report.page.report", lack)
    here(launched_bucket, ["plan"])
    assert "report: warning: not written (No module named 'matplotlib')" in capfd.readouterr().err
    assert Bucket(launched_bucket).read("run/plan.json")


def test_what_a_failed_stage_leaves_is_in_the_bucket(launched_bucket, tmp_path):
    def fail(run, stage):
        (run.logs / "why.txt").write_text("no memory")
        raise RunError("no memory")

    with pytest.raises(RunError):
        here(launched_bucket, ["plan"], fail)
    assert Bucket(launched_bucket).read("run/logs/why.txt") == b"no memory"


def test_an_address_that_nobody_launched_to_is_one_line(tmp_path):
    (tmp_path / "store").mkdir()
    with pytest.raises(InputError, match=r"holds no launched/recipe\.yaml"):
        here(f"file://{tmp_path}/store", ["plan"])


def test_saved_steps_are_sent_during_train_and_fetched_by_the_next_attempt(launched_bucket, tmp_path):
    def save(run, stage):
        (run.checkpoints / "5").mkdir(parents=True)
        (run.checkpoints / "5" / "training.json").write_text("{}")
        raise RunError("preempted")

    with pytest.raises(RunError):
        here(launched_bucket, ["train"], save)
    assert complete_checkpoints(Bucket(launched_bucket)) == [5]
    there = []
    here(launched_bucket, ["train"], lambda run, _: there.extend(run.checkpoints.rglob("*.json")))
    assert [path.parent.name for path in there] == ["5"]


FINISHED = {"checkpoints/14/adapter": "a", "checkpoints/14/training.json": "{}", "train.json": "{}", "logs/steps": "2"}


@pytest.mark.parametrize("moment", range(8))
def test_stopped_while_the_last_step_is_copied_the_bucket_has_no_record_of_its_training(
    launched_bucket, monkeypatch, moment
):
    """SIGTERM raises once, and what is sent after it, in the seconds that are left, goes on."""
    write, written = Bucket.write, []

    def stopped(self, name, content):
        written.append(name)
        if len(written) == moment + 1:
            raise Terminated("stopped by SIGTERM")
        write(self, name, content)

    def train(run, stage):
        for name, text in FINISHED.items():
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            (run.path / name).write_text(text)
        monkeypatch.setattr(Bucket, "write", stopped)

    try:
        here(launched_bucket, ["train"], train)
    except Terminated:
        pass
    else:
        assert moment == 7, "seven objects are written: two and .whole, recipe.yaml, logs, train.json and the report"
    bucket = Bucket(launched_bucket)
    assert complete_checkpoints(bucket) == [14] or bucket.read("run/train.json") is None


def test_a_step_that_could_not_be_copied_keeps_the_record_of_its_training_back(launched_bucket, monkeypatch):
    write = Bucket.write

    def broken(self, name, content):
        if name.startswith("checkpoints/"):
            raise MachineError("cannot be reached")
        write(self, name, content)

    def train(run, stage):
        (run.checkpoints / "14").mkdir(parents=True)
        (run.checkpoints / "14" / "training.json").write_text("{}")
        run.record_file("train").write_text("{}")

    monkeypatch.setattr(Bucket, "write", broken)
    with pytest.raises(MachineError):
        here(launched_bucket, ["train"], train)
    assert Bucket(launched_bucket).read("run/train.json") is None


def test_a_later_host_trains_and_writes_nothing(launched_bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("gemsmith.launch.worker.is_later_host", lambda: True)
    done = []
    here(launched_bucket, ["data", "train", "export"], lambda _run, stage: done.append(stage))
    assert done == ["data", "train"] and not Bucket(launched_bucket).names("run/")


def test_merged_weights_are_fetched_only_for_a_stage_that_reads_them(launched_bucket, tmp_path):
    here(launched_bucket, ["plan"])
    Bucket(launched_bucket).write("run/merged/model.safetensors.index.json", b"{}")
    for stages, there in ((["export"], False), (["verify"], True)):
        here(launched_bucket, stages, lambda *_: None)
        assert Path("work/run/merged").exists() is there
