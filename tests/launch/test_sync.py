import os
import shutil
import time
from pathlib import Path

import pytest

from gemsmith.checkpoints.steps import checkpoint_steps
from gemsmith.errors import RunError
from gemsmith.launch.sync import RunSync, complete_checkpoints, delete_step, fetch_run, fetch_step
from gemsmith.system.storage import Bucket


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "store").mkdir()
    return Bucket(f"file://{tmp_path}/store")


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class Recorded(Bucket):
    """Notes what is changed, in order; ends with the change of that number, as a killed process does."""

    def __init__(self, url, killed_at=None):
        super().__init__(url)
        self.changes, self.killed_at = [], killed_at

    def _note(self, change):
        if len(self.changes) == self.killed_at:
            raise KeyboardInterrupt
        self.changes.append(change)

    def write(self, name, content):
        self._note(("write", name))
        super().write(name, content)

    def delete(self, name):
        self._note(("delete", name))
        super().delete(name)


def names(changes, kind):
    return [name for change, name in changes if change == kind]


STAGES = {"recipe.yaml": "r", "data.json": "{}", "data/rows": "1", "train.json": "{}", "logs/steps": "2"}


def test_records_are_written_last_and_in_their_order(bucket, tmp_path):
    recorded = Recorded(bucket.url)
    RunSync(recorded, put(tmp_path / "run", STAGES)).send()
    written = names(recorded.changes, "write")
    assert written[-2:] == ["run/data.json", "run/train.json"] and len(written) == 5


def test_only_what_changed_is_sent_again(bucket, tmp_path):
    recorded = Recorded(bucket.url)
    run = put(tmp_path / "run", STAGES)
    mirror = RunSync(recorded, run)
    mirror.send()
    recorded.changes.clear()
    put(run, {"logs/steps": "longer"})
    mirror.send()
    assert recorded.changes == [("write", "run/logs/steps")]


REDONE = {"data/rows": "another", "data/more": "3", "data.json": '{"again": 1}'}


@pytest.mark.parametrize("killed_at", range(5))
def test_a_record_in_the_bucket_is_never_of_other_files_than_those_beside_it(bucket, tmp_path, killed_at):
    """A stage done again is sent and the machine dies at any moment: what is fetched then fits together."""
    run = put(tmp_path / "run", STAGES)
    RunSync(bucket, run).send()
    again = RunSync(Recorded(bucket.url, killed_at), tmp_path / "second")
    again.fetch()
    put(tmp_path / "second", REDONE)
    try:
        again.send()
    except KeyboardInterrupt:
        pass
    else:
        assert killed_at == 4, "there are four changes to die at"
    fetch_run(bucket, tmp_path / "home")
    record = tmp_path / "home" / "data.json"
    if record.exists():
        rows = {path.name: path.read_text() for path in (tmp_path / "home" / "data").iterdir()}
        assert (record.read_text(), rows) in [("{}", {"rows": "1"}), ('{"again": 1}', {"rows": "another", "more": "3"})]


def test_what_a_stage_deletes_is_deleted_in_the_bucket(bucket, tmp_path):
    run = put(tmp_path / "run", STAGES)
    mirror = RunSync(bucket, run)
    mirror.send()
    (run / "logs" / "steps").unlink()
    mirror.send()
    assert "run/logs/steps" not in bucket.names()


STEP = {"10/adapter": "a" * 100, "10/.zarray": "hidden", "10/training.json": "{}"}


@pytest.mark.parametrize("killed_at", range(5))
def test_a_saved_step_is_whole_or_not_there(bucket, tmp_path, killed_at):
    put(tmp_path / "run" / "checkpoints", STEP)
    mirror = RunSync(Recorded(bucket.url, killed_at), tmp_path / "run")
    try:
        mirror.send_steps()
    except KeyboardInterrupt:
        assert complete_checkpoints(bucket) == [] and killed_at < 4
        return
    assert killed_at == 4 and complete_checkpoints(bucket) == [10]
    fetch_step(bucket, 10, tmp_path / "home")
    assert {name: (tmp_path / "home" / name).read_text() for name in STEP} == STEP


def test_steps_that_training_deleted_are_deleted_what_says_whole_first(bucket, tmp_path):
    checkpoints = put(tmp_path / "run" / "checkpoints", STEP | {"20/training.json": "{}"})
    recorded = Recorded(bucket.url)
    mirror = RunSync(recorded, tmp_path / "run")
    mirror.send_steps()
    for path in (checkpoints / "10").iterdir():
        path.unlink()
    (checkpoints / "10").rmdir()
    mirror.send_steps()
    assert complete_checkpoints(bucket) == [20]
    assert names(recorded.changes, "delete")[0] == "checkpoints/10.whole"
    assert not bucket.names("checkpoints/10/")


def test_a_step_that_is_not_what_was_saved_is_refused(bucket, tmp_path):
    put(tmp_path / "run" / "checkpoints", STEP)
    RunSync(bucket, tmp_path / "run").send_steps()
    bucket.write("checkpoints/10/adapter", b"b")
    with pytest.raises(RunError, match=r"10/adapter: is not what was saved"):
        fetch_step(bucket, 10, tmp_path / "home")
    delete_step(bucket, 10)
    assert complete_checkpoints(bucket) == []


def test_a_machine_that_was_given_up_as_lost_changes_nothing_any_more(bucket, tmp_path):
    lost, next_one = (RunSync(bucket, put(tmp_path / name, STAGES)) for name in ("lost", "next"))
    lost.acquire_lease()
    next_one.acquire_lease()
    next_one.send()
    put(tmp_path / "lost", {"data.json": "stale"})
    with pytest.raises(RunError, match="another machine has taken this run over"):
        lost.send()
    assert bucket.read("run/data.json") == b"{}"


def test_steps_are_copied_while_training_goes_on(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("gemsmith.launch.sync._BETWEEN_LOOKS_S", 0.02)
    mirror = RunSync(bucket, tmp_path / "run")
    with mirror.watching():
        put(tmp_path / "run" / "checkpoints", STEP)
        deadline_s = time.monotonic() + 60
        while not complete_checkpoints(bucket) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert complete_checkpoints(bucket) == [10]
    assert mirror.failures == ()


@pytest.mark.parametrize("killed_at", range(3))
def test_a_copy_at_home_that_is_cut_off_has_no_record_of_other_files(bucket, tmp_path, monkeypatch, killed_at):
    home = tmp_path / "home"
    RunSync(bucket, put(tmp_path / "run", STAGES)).send()
    fetch_run(bucket, home)
    RunSync(bucket, put(tmp_path / "run", {"data/rows": "another", "data.json": '{"again": 1}'})).send()
    download, done = Bucket.download, []

    def cut_off(self, name, target):
        if len(done) == killed_at:
            raise KeyboardInterrupt
        done.append(download(self, name, target))

    monkeypatch.setattr(Bucket, "download", cut_off)
    with pytest.raises(KeyboardInterrupt):
        fetch_run(bucket, home)
    assert not (home / "data.json").exists() and not (home / "train.json").exists()


def test_what_a_machine_made_and_had_not_sent_when_it_was_killed_is_sent_once_it_is_up_again(bucket, tmp_path):
    run = put(tmp_path / "run", STAGES)
    RunSync(bucket, run).send()
    put(run, {"data/more": "3"})
    again = RunSync(bucket, run)
    again.fetch()
    again.send()
    assert bucket.read("run/data/more") == b"3"


class Stale(Bucket):
    """Lists what was there a while ago, and reads what is there."""

    def __init__(self, url, listed):
        super().__init__(url)
        self.listed = listed

    def names(self, prefix=""):
        return [name for name in self.listed if name.startswith(prefix)]


class Listed(Recorded):
    """Keeps each list that there ever was."""

    def _note(self, change):
        self.lists = [*getattr(self, "lists", []), self.names()]
        super()._note(change)


def test_of_a_list_that_is_out_of_date_comes_a_run_that_goes_on_or_one_line(bucket, tmp_path, record_property):
    """A bucket may not list what was just written, and still list what was deleted."""
    listed, run = Listed(bucket.url), put(tmp_path / "run", STAGES | {"checkpoints/1/training.json": "1"})
    mirror = RunSync(listed, run)
    mirror.acquire_lease()
    mirror.send()
    (run / "train.json").unlink()  # it is trained on
    put(run, {"checkpoints/2/training.json": "2", "logs/steps": "3"})
    shutil.rmtree(run / "checkpoints" / "1")
    mirror.send()
    told = []
    for number, names in enumerate(listed.lists):
        home = tmp_path / str(number)
        try:
            RunSync(Stale(bucket.url, names), home).fetch()
        except RunError as error:
            told.append(str(error))
        records = [file.name for file in home.glob("*.json")]
        assert "train.json" not in records
        assert not records or (home / "data" / "rows").read_text() == "1"
        for step in checkpoint_steps(home / "checkpoints"):
            assert (home / "checkpoints" / str(step) / "training.json").read_text() == str(step) == "2"
    assert 0 < len(told) < len(listed.lists)
    assert all("was deleted while it was read; run the same command again" in error for error in told)
    record_property("tries", len(listed.lists))


def test_names_that_lead_out_of_the_run_directory_are_refused(tmp_path):
    class Hostile:
        url = "gs://b"

        def names(self, prefix):
            return [f"{prefix}../../evil"]

        def download(self, name, target):
            raise AssertionError(target)

    with pytest.raises(RunError, match="leads out of the run directory"):
        fetch_run(Hostile(), tmp_path)
    assert os.listdir(tmp_path) == []
