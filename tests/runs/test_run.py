import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gemsmith import __version__
from gemsmith.errors import MachineError, RecipeError, RunError, VersionError
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import ResolvedValue
from gemsmith.runs.records import Check, DataRecord, ServeRecord, TrainRecord, VerifyRecord
from gemsmith.runs.run import (
    Run,
    commit_recipe,
    find_run,
    has_outputs,
    inputs_sha256,
    is_up_to_date,
    make_provenance,
    open_run,
    open_run_readonly,
    open_source,
    read_record,
    start_clock,
    write_record,
)


def opened(*arguments):
    return open_source(*arguments, lock=lambda folder: None)


def recipe(*overrides: str):
    return build_recipe({"checkpoint": "/folder", "data": {"train": "/rows.jsonl"}, "model": "tiny-31b"}, overrides)


def data_record(run) -> DataRecord:
    return DataRecord(
        provenance=make_provenance(run, "data", start_clock()),
        rows=3,
        dropped={},
        packed_rows=1,
        tokens=30,
        supervised_tokens=10,
        packing_efficiency=0.5,
        length_percentiles={"p50": 10},
        template_sha256="0",
        steps=1,
        rows_sha256="0",
    )


def verify_record(run) -> VerifyRecord:
    return VerifyRecord(
        provenance=make_provenance(run, "verify", start_clock()),
        passed=True,
        checks=(Check(name="names", passed=True, detail=""),),
        changed_tensors=1,
        expected_tensors=1,
        logits_max_abs_difference=None,
    )


@pytest.fixture
def run(tmp_path):
    return open_run(tmp_path / "run", recipe())


def test_a_record_comes_back_as_it_was_written(run):
    record = data_record(run)
    write_record(run, record)
    assert read_record(run, DataRecord) == record
    assert is_up_to_date(run, "data")


def test_a_missing_record_names_the_command_that_makes_it(run):
    with pytest.raises(RunError, match="run first: gemsmith train "):
        read_record(run, TrainRecord)


def test_a_damaged_record_is_refused_and_not_complete(run):
    write_record(run, data_record(run))
    run.record_file("data").write_text('{"status": "complete"}')
    with pytest.raises(RunError, match="is not a record of this version"):
        read_record(run, DataRecord)
    assert not is_up_to_date(run, "data")


@pytest.mark.parametrize(("version", "shown"), [(99, "99"), (0, "0"), ("2", '"2"'), (None, "null")])
def test_a_record_of_another_version_is_refused_and_never_made_again_in_passing(run, version, shown):
    write_record(run, data_record(run))
    file = run.record_file("data")
    record = json.loads(file.read_text()) | {"schema_version": version, "unknown": 1}
    record["provenance"]["gemsmith"] = "9.1"
    file.write_text(json.dumps(record))
    expected = (
        rf"data\.json: has schema_version {shown}, this Gemsmith {__version__} reads 1; open it with Gemsmith 9\.1, or "
        r"start anew"
    )
    for look in (lambda: read_record(run, DataRecord), lambda: is_up_to_date(run, "data")):
        with pytest.raises(VersionError, match=expected):
            look()


def test_a_record_of_another_version_may_have_any_form(run):
    run.record_file("data").write_text('{"schema_version": 2, "provenance": []}')
    with pytest.raises(VersionError, match="open it with the Gemsmith that wrote it, or"):
        read_record(run, DataRecord)


def test_the_record_of_a_server_is_made_by_the_command_that_is_named(run):
    with pytest.raises(RunError, match=r"run first: gemsmith serve .* --json$"):
        read_record(run, ServeRecord)


def test_a_verification_that_failed_is_done_again(run):
    write_record(run, verify_record(run).model_copy(update={"passed": False}))
    assert not is_up_to_date(run, "verify")


def test_a_stage_is_no_longer_complete_once_an_earlier_record_changed(run):
    write_record(run, verify_record(run))
    assert is_up_to_date(run, "verify")
    run.record_file("export").write_text("{}")
    assert not is_up_to_date(run, "verify")


def test_a_key_that_a_begun_stage_has_read_cannot_change(run):
    write_record(run, data_record(run))
    with pytest.raises(RunError, match=r"data\.max_length is 4096 there and 128 here, and data has used it"):
        open_run(run.path, recipe("data.max_length=128"))
    assert "4096" in run.recipe_file.read_text()


def test_training_that_left_only_checkpoints_has_begun(run):
    (run.checkpoints / "10").mkdir(parents=True)
    assert has_outputs(run, "train")
    with pytest.raises(RunError, match=r"lora\.rank is 64 there and 8 here, and train has used it"):
        open_run(run.path, recipe("lora.rank=8"))


def test_a_key_that_no_begun_stage_has_read_may_change(run):
    write_record(run, data_record(run))
    assert open_run(run.path, recipe("bench.prompts=7")).recipe.bench.prompts == 7
    assert find_run(run.path).bench.prompts == 7


def test_other_held_out_rows_do_not_touch_what_was_trained(run):
    write_record(run, data_record(run))
    (run.checkpoints / "10").mkdir(parents=True)
    assert open_run(run.path, recipe("data.eval=/held.jsonl")).recipe.data.eval == "/held.jsonl"
    assert is_up_to_date(run, "data")


def test_other_held_out_rows_are_refused_where_training_measures_its_loss_on_them(tmp_path):
    run = open_run(tmp_path / "short", recipe("data.eval=/held.jsonl", "train.eval_steps=2"))
    write_record(run, data_record(run))
    with pytest.raises(RunError, match=r"data\.eval is \"/held\.jsonl\" there and .*, and data has used it"):
        open_run(run.path, recipe("data.eval=/others.jsonl", "train.eval_steps=2"))


def test_a_run_is_borrowed_with_other_keys_of_one_section_only(tmp_path):
    run = open_run(tmp_path / "short", recipe("data.max_length=512"))
    before = run.recipe_file.read_bytes()
    assert open_run_readonly(run.path, ["serve.port=81"], section="serve").recipe.serve.port == 81
    assert run.recipe_file.read_bytes() == before
    with pytest.raises(RunError, match=r"lora\.rank: cannot be changed here"):
        open_run_readonly(run.path, ["serve.port=81", "lora.rank=8"], section="serve")


def test_a_plan_holds_nobody_to_its_keys(run):
    run.record_file("plan").write_text("{}")
    assert open_run(run.path, recipe("lora.rank=8")).recipe.lora.rank == 8


def test_a_stage_that_is_done_again_may_have_other_keys(run):
    write_record(run, data_record(run))
    assert open_run(run.path, recipe("data.max_length=128"), force=("data",)).recipe.data.max_length == 128


def test_reasons_stay_in_the_recipe_when_the_run_is_opened_again(tmp_path):
    open_run(tmp_path / "run", recipe(), [ResolvedValue("model", "tiny-31b", "read from config.json")])
    open_run(tmp_path / "run", recipe("bench.prompts=7"))
    assert 'model: "tiny-31b"  # read from config.json' in (tmp_path / "run" / "recipe.yaml").read_text()


def test_a_folder_with_other_files_is_not_taken_for_a_run(tmp_path):
    (tmp_path / "thesis.doc").touch()
    with pytest.raises(RunError, match="is not empty"):
        open_run(tmp_path, recipe())


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(RunError, match=r"holds no recipe\.yaml"):
        find_run(tmp_path)


def test_every_stage_depends_on_its_own_keys(run):
    for stage, key in {
        "plan": "hardware.machines=[cpu]",
        "data": "data.packing=false",
        "train": "optimizer.learning_rate=1.0",
        "export": "export.step=3",
        "serve": "serve.port=81",
        "bench": "bench.prompts=2",
        "eval": "eval.max_tokens=2",
    }.items():
        changed = type(run)(path=run.path, recipe=recipe(key))
        assert inputs_sha256(run, stage) != inputs_sha256(changed, stage), stage


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs takes root")
def test_a_full_disk_leaves_the_old_record(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine does not let a tmpfs be mounted")
    try:
        run = open_run(disk / "run", recipe())
        write_record(run, data_record(run))
        before = run.record_file("data").read_bytes()
        filler = Path(disk / "filler")
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(b"0" * 65536)
        with pytest.raises(OSError, match="No space left"):
            write_record(run, data_record(run).model_copy(update={"dropped": {"x" * 20000: 1}}))
        assert run.record_file("data").read_bytes() == before
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_would_have_stopped_a_run_that_goes_on_may_become_anything(run):
    (run.checkpoints / "10").mkdir(parents=True)
    assert open_run(run.path, recipe("train.on_nonfinite=skip")).recipe.train.on_nonfinite == "skip"
    with pytest.raises(RunError, match=r'train\.on_nonfinite is "skip" there and "stop" here'):
        open_run(run.path, recipe())
    with pytest.raises(RunError, match=r'train\.on_spike is "report" there and "skip" here'):
        open_run(run.path, recipe("train.on_nonfinite=skip", "train.on_spike=skip"))


def test_training_again_holds_its_recipe_back_until_it_has_begun(run):
    (run.checkpoints / "10").mkdir(parents=True)
    before = run.recipe_file.read_bytes()
    again = open_run(run.path, recipe("lora.rank=8"), force=("train",))
    assert run.recipe_file.read_bytes() == before and again.recipe.lora.rank == 8
    commit_recipe(again)
    assert find_run(run.path).lora.rank == 8
    commit_recipe(again)
    assert find_run(run.path).lora.rank == 8


def test_a_recipe_that_was_held_back_in_vain_is_forgotten(run):
    """A forced stage failed; then what it was to replace was deleted, and the stage is done with another recipe."""
    write_record(run, data_record(run))
    open_run(run.path, recipe("data.max_length=128"), force=("data",))
    run.record_file("data").unlink()
    commit_recipe(open_run(run.path, recipe("data.max_length=512"), force=("data",)))
    assert find_run(run.path).data.max_length == 512


def test_checkpoints_are_in_the_run_or_where_the_recipe_says(run, tmp_path, monkeypatch):
    def folder(name: str):
        return str(Run(path=run.path, recipe=recipe(f"train.checkpoint_folder={name}")).checkpoints)

    assert folder("null") == str(run.path / "checkpoints")
    assert folder("/saved") == "/saved"
    with pytest.raises(
        RecipeError, match=r"train.checkpoint_folder: 's3://b/f' was given; allowed: a folder, or gs://bucket/folder"
    ):
        folder("s3://b/f")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gcsfs" else name)
    with pytest.raises(MachineError, match=r"gs://b/f needs gcsfs; run: pip install gcsfs"):
        folder("gs://b/f")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert folder("gs://b/f") == "gs://b/f"


def test_open_warmup_may_be_set_while_training_has_not_ended(run):
    (run.checkpoints / "10").mkdir(parents=True)
    assert open_run(run.path, recipe("optimizer.warmup_steps=100")).recipe.optimizer.warmup_steps == 100
    with pytest.raises(RunError, match=r"optimizer\.warmup_steps is 100 there and 7 here, and train has used it"):
        open_run(run.path, recipe("optimizer.warmup_steps=7"))


def test_what_is_as_it_was_keeps_what_was_said_of_it(tmp_path):
    """Warm-up that was left open came to something else in an earlier version: the run's recipe must not begin to say
    otherwise."""
    derived = [
        ResolvedValue("optimizer.warmup_steps", None, "a tenth"),
        ResolvedValue("bench.input_tokens", (7, 9), "fits"),
    ]
    open_run(tmp_path / "run", recipe())
    open_run(tmp_path / "run", recipe("bench.input_tokens=[7, 9]"), derived)
    text = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "warmup_steps: null\n" in text and "input_tokens: [7, 9]  # fits" in text


def test_a_run_opens_again_as_it_was_and_its_derived_lengths_make_way(tmp_path, tiny_checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "my.yaml"
    source.write_text(
        f"checkpoint: {tiny_checkpoint('tiny-31b')}\ndata: {{train: {{task: verilog, rows: 3}}, max_length: 64}}\n"
    )
    first = opened(source)
    text = first.recipe_file.read_text()
    assert "input_tokens: [512, 1792]  # the default is 512 and 4096" in text
    assert "warmup_steps: null  # a tenth of all steps, at most 100" in text
    assert opened(first.path) == first == Run(path=first.path, recipe=opened(source).recipe)
    assert first.recipe_file.read_text() == text
    smaller = opened(first.path, None, ["serve.max_model_len=640"]).recipe
    assert (smaller.serve.max_model_len, smaller.bench.input_tokens) == (640, (384,))
    assert opened(first.path, None, ["serve.max_model_len=null"]).recipe == first.recipe


def test_a_server_is_borrowed_with_less_room_than_bench_needs(tmp_path, tiny_checkpoint):
    source = tmp_path / "my.yaml"
    source.write_text(f"checkpoint: {tiny_checkpoint('tiny-31b')}\ndata: {{train: {{task: verilog, rows: 3}}}}\n")
    run = opened(source, tmp_path / "run")
    assert open_run_readonly(run.path, ["serve.max_model_len=640"], section="serve").recipe.serve.max_model_len == 640


def test_a_run_whose_base_has_gone_still_opens(tmp_path, tiny_checkpoint):
    base = shutil.copytree(tiny_checkpoint("tiny-31b"), tmp_path / "base")
    source = tmp_path / "my.yaml"
    source.write_text(f"checkpoint: {base}\ndata: {{train: {{task: verilog, rows: 3}}}}\n")
    run = opened(source, tmp_path / "run")
    shutil.rmtree(base)
    assert opened(run.path) == run
