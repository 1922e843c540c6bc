"""Whole training runs with TRL on CPU: what they record, and that stopping and continuing changes nothing."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from types import ModuleType

import numpy as np
import pytest
import torch
from tensorboardX.proto.event_pb2 import Event
from transformers.quantizers.quantizers_utils import should_convert_module

from gemsmith.checkpoint import open_checkpoint
from gemsmith.checkpoint.adapter import read_peft_adapter
from gemsmith.data import Batches
from gemsmith.errors import CheckpointError, EngineError, MachineError, Preempted, RecipeError, RunError
from gemsmith.export.stage import export
from gemsmith.recipe_file import build_recipe
from gemsmith.records import TrainRecord, TrainStep
from gemsmith.run import Run, find_run, is_complete, open_run, read_record
from gemsmith.train import session
from gemsmith.train.stage import train
from gemsmith.train.trl.checkpoints import Checkpoints
from gemsmith.train.trl.model import load_base, nf4_config
from gemsmith.train.trl.trainer import Trainer
from gemsmith.verify.stage import verify
from gemsmith.zoo import find_variant, text_tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, at import
BACKEND = {"backend": "trl"}


@pytest.fixture(scope="module")
def whole(prepare, tmp_path_factory):
    """A run of six steps that nothing stopped, and its record. Tests must not change it."""
    run = prepare(tmp_path_factory.mktemp("whole") / "run", train=BACKEND)
    return run, train(run)


def read_steps(run):
    return [
        TrainStep.model_validate_json(line)
        for line in (run.logs / "train_steps.jsonl").read_text().splitlines()
        if line.endswith("}")
    ]


def read_events(run):
    """TensorBoard's scalars of a run that was started once: tag -> step -> value."""
    (file,) = run.tensorboard.iterdir()
    events, data, place = {}, file.read_bytes(), 0
    while place < len(data):
        (size,) = struct.unpack_from("<Q", data, place)
        event = Event.FromString(data[place + 12 : place + 12 + size])
        place += 16 + size
        for value in event.summary.value:
            events.setdefault(value.tag, {})[event.step] = value.simple_value
    return events


def same_numbers(record, other):
    numbers = ("step", "loss", "grad_norm", "learning_rate", "real_tokens")
    return all(
        [getattr(step, name) for step in record.steps] == [getattr(step, name) for step in other.steps]
        for name in numbers
    )


def snapshot(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name[0] != "."
    }


def saved_bytes(run, step):
    """Everything that a checkpoint holds but what it says about its attempts."""
    names = ("adapter_model.safetensors", "adapter_config.json", "moments.safetensors")
    return {name: (run.checkpoints / str(step) / name).read_bytes() for name in names}


def interrupt(monkeypatch, *, at, by):
    """Lets the batch of step `at` raise an error or send a signal."""
    batch = Batches.batch

    def interrupted(self, step):
        if step == at:
            if isinstance(by, signal.Signals):
                os.kill(os.getpid(), by)
            else:
                raise by
        return batch(self, step)

    monkeypatch.setattr(Batches, "batch", interrupted)


def test_a_run_records_every_step_and_counts_its_adapters(whole):
    run, record = whole
    assert is_complete(run, "train") and record.backend == "trl"
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert record.steps[0].learning_rate == 0 and record.steps[2].learning_rate == 1e-2
    assert record.steps[-1].loss < record.steps[0].loss - 0.1
    assert record.adapted == {"q": 2, "k": 2, "v": 1, "o": 2, "gate": 2, "up": 2, "down": 2}
    assert record.last_checkpoint == "checkpoints/6"
    assert record.mesh == {"replica": 1, "fsdp": 1, "sequence": 1, "tp": 1}
    assert record.attention == {
        "sliding_attention": "documents: torch's flash_attention kernel, head_dim 16",
        "full_attention": "documents: torch's flash_attention kernel, head_dim 32",
    }
    adapter = read_peft_adapter(run.checkpoints / "6")
    assert record.trained_parameters == sum(pair.a.size + pair.b.size for pair in adapter.modules.values())
    assert record.peak_memory_bytes > 1e8 and record.real_tokens_per_s > 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["2", "4", "6"]
    events = read_events(run)
    assert events["train/loss"] == {step.step: pytest.approx(step.loss) for step in record.steps}
    assert set(events) == {"train/loss", "train/grad_norm", "train/learning_rate", "train/real_tokens_per_s"}
    assert [step.loss for step in read_steps(run)] == [step.loss for step in record.steps]


@pytest.mark.slow
def test_a_loss_that_does_not_fall_is_in_the_record(prepared_run):
    record = train(prepared_run(train=BACKEND, optimizer={"learning_rate": 1e-9}))
    assert (
        len(record.notices) == 1
        and "optimizer.learning_rate, 1e-09, is too low, or 6 steps are too few" in record.notices[0]
    )
    assert record.grave_notices == ()


def test_a_checkpoint_is_an_adapter_that_peft_opens(whole, small_checkpoint):
    import peft
    import transformers

    run, _ = whole
    base = transformers.AutoModelForCausalLM.from_pretrained(small_checkpoint, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, run.checkpoints / "6")
    name = "model.language_model.layers.1.self_attn.k_proj"
    weight = model.get_base_model().get_submodule(name).lora_B["default"].weight
    assert np.array_equal(weight.detach().numpy(), read_peft_adapter(run.checkpoints / "6").modules[name].b)
    assert weight.abs().max() > 0


def test_it_is_exported_and_verified_like_any_other(trained):
    run, _ = trained
    export(run)
    assert verify(run).passed


@pytest.fixture
def trained(whole, tmp_path):
    """A copy of the whole run."""
    shutil.copytree(whole[0].path, tmp_path / "copy")
    return Run(path=tmp_path / "copy", recipe=whole[0].recipe), whole[1]


@pytest.mark.slow
def test_control_c_leaves_the_last_complete_checkpoint_to_continue_from(whole, prepared_run, monkeypatch):
    run = prepared_run(train=BACKEND)
    interrupt(monkeypatch, at=6, by=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    assert not is_complete(run, "train")
    (run.checkpoints / ".5.partial").mkdir()  # what a kill in the middle of a save leaves behind
    record = train(run)
    assert record.resumed_at == (4,)
    assert same_numbers(record, whole[1])
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["2", "4", "6"]
    assert [step.step for step in read_steps(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_sigterm_saves_the_step_under_way(whole, prepared_run, monkeypatch):
    run = prepared_run(train=BACKEND)
    interrupt(monkeypatch, at=3, by=signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="step 3 is saved") as stopped:
        train(run)
    assert stopped.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.undo()
    record = train(run)
    assert record.resumed_at == (3,)
    assert same_numbers(record, whole[1])
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)


KILLED = """
import sys, time
from pathlib import Path
from gemsmith.data import Batches
from gemsmith.records import TrainStep
from gemsmith.run import Run, find_run
from gemsmith.train.stage import train
batch = Batches.batch
def slowly(self, step):
    time.sleep(0.2 if step > 2 else 0)
    return batch(self, step)
Batches.batch = slowly
path = Path(sys.argv[1])
train(Run(path=path, recipe=find_run(path)))
"""


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bytes_of_one_that_never_stopped(whole, prepared_run):
    run = prepared_run(train=BACKEND)
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with (run.path / "stderr").open("w") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", KILLED, str(run.path)], stderr=stderr, env=environment
        )
        deadline_s = time.monotonic() + 300
        while not (run.checkpoints / "2").exists() and child.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        child.kill()
        assert child.wait() == -signal.SIGKILL, (run.path / "stderr").read_text()
    assert 2 <= len(read_steps(run)) < 6
    record = train(run)
    assert record.resumed_at[0] in (2, 4)
    assert same_numbers(record, whole[1])
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)


@pytest.mark.slow
def test_micro_batches_change_nothing_but_rounding(prepare, tmp_path):
    keys = {"lora": {"dropout": 0.0}, "train": BACKEND | {"rows_per_step": 3}}
    one, three = (
        train(prepare(tmp_path / str(count), **(keys | {"train": keys["train"] | {"micro_batches": count}})))
        for count in (1, 3)
    )
    assert [step.loss for step in three.steps] == pytest.approx([step.loss for step in one.steps], rel=1e-6)
    assert [step.grad_norm for step in three.steps] == pytest.approx([step.grad_norm for step in one.steps], rel=1e-5)


@pytest.mark.slow
def test_computing_a_layer_again_changes_nothing(whole, prepared_run):
    run = prepared_run(train=BACKEND | {"remat": "layer"})
    assert same_numbers(train(run), whole[1])
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)


@pytest.mark.slow
def test_compiled_layers_compute_the_same(prepare, tmp_path, monkeypatch):
    """As torch.compile cuts them into graphs; what its compiler makes of a graph takes a minute and is its own
    affair."""
    compile_whole = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compile_whole(self, backend="aot_eager", **options)
    )
    keys = BACKEND | {"optimizer_steps": 2}
    plain, compiled = (
        train(prepare(tmp_path / str(value), train=keys | {"compile": value}, lora={"dropout": 0.0}))
        for value in (False, True)
    )
    assert [step.loss for step in compiled.steps] == pytest.approx([step.loss for step in plain.steps], rel=1e-6)


def test_a_base_in_bfloat16_is_trained_with_adapters_in_float32(prepared_run):
    run = prepared_run(train=BACKEND | {"dtype": "bfloat16"})
    record = train(run)
    assert record.steps[-1].loss < record.steps[0].loss - 0.1
    b = read_peft_adapter(run.checkpoints / "6").modules["model.language_model.layers.0.mlp.up_proj"].b
    assert (b != torch.from_numpy(b).bfloat16().float().numpy()).any()


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_and_is_not_saved(prepared_run):
    run = prepared_run(optimizer={"learning_rate": 1e30, "warmup_steps": 0}, train=BACKEND | {"checkpoint_every": 1})
    with pytest.raises(EngineError, match=r"step 2 has loss nan .* the last checkpoint is .*checkpoints/1;"):
        train(run)
    assert [path.name for path in run.checkpoints.iterdir()] == ["1"]
    assert [step.step for step in read_steps(run)] == [1]


@pytest.mark.slow
def test_a_step_that_is_no_number_is_skipped_where_the_recipe_says_so(prepare, tmp_path, monkeypatch):
    compute_loss = Trainer.compute_loss

    def poisoned(self, model, inputs, **options):
        return compute_loss(self, model, inputs, **options) * (np.nan if inputs["step"] == 3 else 1.0)

    monkeypatch.setattr(Trainer, "compute_loss", poisoned)
    keys = BACKEND | {"checkpoint_every": 1, "on_nonfinite": "skip", "keep_checkpoints": 6}
    run = prepare(tmp_path / "run", train=keys)
    record = train(run)
    assert record.skipped == (3,) and record.spikes == ()
    assert saved_bytes(run, 3) == saved_bytes(run, 2)
    assert saved_bytes(run, 4) != saved_bytes(run, 3)
    stopped = prepare(tmp_path / "stopped", train=keys)
    with monkeypatch.context() as patch:
        interrupt(patch, at=4, by=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            train(stopped)
    assert train(stopped).skipped == (3,)
    assert saved_bytes(stopped, 6) == saved_bytes(run, 6)


@pytest.mark.slow
def test_a_spike_is_told_or_skipped_or_ends_the_run_as_the_recipe_says(whole, prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "spike_limit", lambda losses, step, factor: 1.0 if step == 4 else np.inf)
    run = prepare(tmp_path / "report", train=BACKEND)
    assert train(run).spikes == (4,)
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)
    run = prepare(tmp_path / "skip", train=BACKEND | {"on_spike": "skip", "checkpoint_every": 1, "keep_checkpoints": 6})
    record = train(run)
    assert record.skipped == record.spikes == (4,)
    assert saved_bytes(run, 4) == saved_bytes(run, 3) != saved_bytes(run, 5)
    run = prepare(tmp_path / "stop", train=BACKEND | {"on_spike": "stop"})
    with pytest.raises(EngineError, match=r"step 4 has loss .*train.on_spike is stop.*checkpoints/2; lower"):
        train(run)
    skipping = open_run(run.path, build_recipe(run.recipe.model_dump(mode="json"), ["train.on_spike=skip"]))
    assert train(skipping).skipped == (4,)


def test_training_starts_from_an_adapter(whole, prepared_run, tmp_path):
    folder = whole[0].checkpoints / "6"
    run = prepared_run(
        train=BACKEND | {"start_adapter": str(folder), "optimizer_steps": 1}, optimizer={"warmup_steps": 1}
    )
    record = train(run)
    first, last = (
        read_peft_adapter(place).modules["model.language_model.layers.0.mlp.up_proj"]
        for place in (folder, run.checkpoints / "1")
    )
    assert np.array_equal(first.b, last.b) and np.array_equal(first.a, last.a)  # the first update's rate is 0
    assert record.steps[0].loss < whole[1].steps[0].loss - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("size", ["8k", "300k"])  # there is room for nothing, and for the adapter without the moments
def test_a_full_disk_is_one_line(prepared_run, small_disk, size):
    run = prepared_run(train=BACKEND, lora={"rank": 32})
    small_disk(run.checkpoints, size)
    with pytest.raises(MachineError, match="no space left on device") as error:
        train(run)
    assert "\n" not in str(error.value)
    assert not list(run.checkpoints.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(prepared_run, monkeypatch):
    """Also where it is one of several processes that finds out."""
    run = prepared_run(train=BACKEND)

    def refused(*_):
        raise PermissionError(13, "Permission denied", "there")

    monkeypatch.setattr(Checkpoints, "save", refused)
    with pytest.raises(
        MachineError, match=r"permission denied \(there\); name another place, or change its permissions"
    ):
        train(run)


def test_training_again_that_cannot_begin_loses_nothing(trained, gemsmith, monkeypatch):
    run, _ = trained
    before = snapshot(run.path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trainer, "training_step", full)
    code, _, err = gemsmith("train", run.path, "--force", "--set", "optimizer.learning_rate=0.1")
    assert code == 2 and "no space left on device" in err
    assert snapshot(run.path) == before
    assert is_complete(run, "train")


@pytest.mark.slow
def test_training_again_starts_from_nothing_with_the_new_recipe(trained, gemsmith):
    run, record = trained
    code, _, err = gemsmith("train", run.path, "--force", "--set", "train.checkpoint_every=5", "--set", "lora.rank=2")
    assert code == 0, err
    again = read_record(run, TrainRecord)
    assert again.resumed_at == () and again.trained_parameters * 2 == record.trained_parameters
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["5", "6"]
    assert find_run(run.path).lora.rank == 2


def test_a_finished_run_whose_record_is_lost_writes_it_again_without_training(trained, monkeypatch):
    run, record = trained
    run.record_file("train").unlink()
    monkeypatch.setattr(Batches, "batch", None)
    assert train(run).steps == record.steps


def test_checkpoints_of_another_recipe_are_refused(whole, prepare, tmp_path):
    shutil.copytree(whole[0].checkpoints, tmp_path / "saved")
    run = prepare(tmp_path / "run", train=BACKEND | {"checkpoint_folder": str(tmp_path / "saved")}, lora={"rank": 2})
    with pytest.raises(
        RunError, match=r"saved/6: was trained with another recipe: lora.rank was 4 and is 2; set it back"
    ):
        train(run)


def test_checkpoints_of_the_jax_backend_are_refused(prepared_run, tmp_path):
    run, step = prepared_run(train=BACKEND | {"checkpoint_folder": str(tmp_path / "saved")}), tmp_path / "saved" / "9"
    (step / "model_params").mkdir(parents=True)
    (step / "model_params" / "_METADATA").touch()
    (step / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 1}')
    with pytest.raises(
        RunError, match=r"saved/9: was trained with another recipe: train.backend was not trl; set .* --force"
    ):
        train(run)


def test_a_damaged_checkpoint_is_one_line(trained):
    run, _ = trained
    file = run.checkpoints / "6" / "moments.safetensors"
    whole = file.read_bytes()
    run.record_file("train").unlink()
    for damaged in (whole[:100], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(
            RunError, match=r"/6: is damaged \(moments.* is not what was saved\); step 4 is good: delete .*/6, then"
        ):
            train(run)
    shutil.rmtree(run.checkpoints / "6")
    assert train(run).resumed_at == (4,)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "train.attention=splash",
            "train.attention: splash was given, train.backend trl has auto, documents, sdpa, eager",
        ),
        (
            "train.remat=[o]",
            "train.remat: a list of results was given, train.backend trl has auto, none, layer; set one of them",
        ),
        ("train.mesh={tp: 2}", "train.mesh: train.backend trl splits by replica and fsdp only"),
        (
            "train.mesh={fsdp: 3}",
            "train.rows_per_step: 2 cannot be split over 3 processes × 1 micro-batches; set a multiple of 3",
        ),
        ("train.dtype=int8", "train.dtype: int8 was given, train.backend trl has bfloat16, float32, nf4"),
        ("train.micro_batches=3", "train.rows_per_step: 2 cannot be split over 1 processes × 3 micro-batches"),
        ("train.backend=tunix", None),
    ],
)
def test_what_the_backend_has_not_is_one_line(prepared_run, gemsmith, keys, expected):
    run = prepared_run(train=BACKEND | {"attention": "sdpa"})
    code, _, err = gemsmith("train", run.path, "--set", keys)
    assert code == 2 and err.splitlines()[-1].startswith(
        f"error: {expected or 'train.attention: sdpa was given, train.backend tunix has'}"
    )


def test_nf4_without_bitsandbytes_is_one_line(prepared_run, gemsmith, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    code, _, err = gemsmith("train", prepared_run(train=BACKEND).path, "--set", "train.dtype=nf4")
    assert (
        code == 2
        and "error: train.dtype: nf4 needs bitsandbytes, which is not installed; run: pip install bitsandbytes" in err
    )


def test_nf4_is_held_as_the_jax_backend_holds_it(monkeypatch):
    """Projections alone, their scales not rounded once more, and no experts, which bitsandbytes leaves as they are."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    variant = find_variant("tiny-e2b")
    config = nf4_config(variant)
    assert config.load_in_4bit and config.bnb_4bit_quant_type == "nf4" and not config.bnb_4bit_use_double_quant
    converted = {
        tensor.role
        for tensor in text_tensors(variant)
        if len(tensor.shape) == 2 and should_convert_module(tensor.module, config.llm_int8_skip_modules)
    }
    assert converted == {"q", "k", "v", "o", "gate", "up", "down"}
    with pytest.raises(
        RecipeError,
        match=r"train\.dtype: nf4 was given, but bitsandbytes leaves the experts of tiny-26b-a4b in bfloat16",
    ):
        nf4_config(find_variant("tiny-26b-a4b"))


def test_a_missing_library_is_one_line(prepared_run, gemsmith, monkeypatch):
    monkeypatch.delitem(sys.modules, "gemsmith.train.trl.backend")
    monkeypatch.delitem(sys.modules, "gemsmith.train.trl.trainer")
    monkeypatch.setitem(sys.modules, "trl", None)
    code, _, err = gemsmith("train", prepared_run(train=BACKEND).path)
    assert (
        code == 2
        and "error: train.backend: trl needs trl, which is not installed; run: pip install 'gemsmith[trl]'" in err
    )


def test_a_config_that_this_transformers_does_not_read_is_one_line(small_recipe, small_checkpoint, tmp_path):
    """From 5.19 on it writes the global layers' heads by layer; 5.12.1 takes no notice, and says so with a
    traceback."""
    folder = shutil.copytree(small_checkpoint, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    heads = {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": text.pop("num_global_key_value_heads")}
    text["per_layer_config"] = {"1": heads}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"per_layer_config, which transformers .* does not read; install 5\.19 or newer"
    ):
        load_base(small_recipe(), open_checkpoint(str(folder)), "eager", torch.device("cpu"))
