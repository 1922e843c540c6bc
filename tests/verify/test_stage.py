import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import LoraPair, read_peft_adapter, write_peft_adapter
from gemsmith.checkpoints.quantized import as_trained
from gemsmith.data.stage import prepare_data
from gemsmith.errors import CheckpointError, VerifyError
from gemsmith.export import stage as stage_module
from gemsmith.export.stage import export
from gemsmith.runs.records import ExportRecord, FileSum, VerifyRecord
from gemsmith.runs.run import read_record, write_record
from gemsmith.system.files import sha256_file
from gemsmith.verify import stage as verify_module
from gemsmith.verify.stage import verify

TINY = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b")
UP = "model.language_model.layers.1.mlp.up_proj.weight"


def failed(run) -> dict[str, str]:
    """Verifies a run that must not pass: the checks that failed, which the record and the error both name."""
    with pytest.raises(VerifyError) as raised:
        verify(run)
    record = read_record(run, VerifyRecord)
    names = {check.name: check.detail for check in record.checks if check.passed is False}
    assert not record.passed
    assert all(name in str(raised.value) for name in names)
    return names


def write_bytes(run, name: str, value: bytes, *, offset: int = 0) -> None:
    place = open_checkpoint(str(run.merged)).places[name]
    with place.file.open("r+b") as file:
        file.seek(place.begin + offset)
        file.write(value)


def raw(run, name: str) -> bytes:
    place = open_checkpoint(str(run.merged)).places[name]
    return place.file.read_bytes()[place.begin : place.end]


def record_again(run) -> None:
    """Makes export.json say what the folders hold now, so that only the checks behind the checksums can see the
    change."""
    sums = {
        part: tuple(
            FileSum(name=file.name, bytes=file.stat().st_size, sha256=sha256_file(file))
            for file in sorted(folder.iterdir())
        )
        for part, folder in (("adapter", run.adapter), ("merged", run.merged))
    }
    write_record(run, read_record(run, ExportRecord).model_copy(update=sums))


def with_keys(run, **sections):
    """The run with these keys of its recipe."""
    parts = {name: getattr(run.recipe, name).model_copy(update=keys) for name, keys in sections.items()}
    return replace(run, recipe=run.recipe.model_copy(update=parts))


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("tiny-e2b", "bfloat16"),
        ("tiny-31b", "float32"),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in TINY if name != "tiny-e2b"),
    ],
)
def test_an_exported_run_passes_every_check(make_run, variant, dtype, capsys):
    run = make_run(variant, dtype)
    record = export(run)
    assert read_record(run, ExportRecord) == record
    assert {file.name for file in record.adapter} == {"adapter_config.json", "adapter_model.safetensors"}
    verified = verify(run)
    assert [check.name for check in verified.checks if check.passed] == [
        "files",
        "base",
        "adapter",
        "other files",
        "tensors",
        "values",
        "norms",
        "logits",
    ]
    assert verified.passed
    assert verified.changed_tensors == verified.expected_tensors == record.merged_tensors
    assert verified.logits_max_abs_difference < 1e-4  # measured: 0 in bfloat16, 2e-6 in float32
    assert capsys.readouterr().out == ""


def test_export_takes_the_step_that_the_recipe_names(make_run, adapter_of):
    adapters = {10: adapter_of("tiny-12b", seed=1), 20: adapter_of("tiny-12b", seed=2)}
    run = make_run(steps=adapters)
    run = type(run)(
        path=run.path,
        recipe=run.recipe.model_copy(update={"export": run.recipe.export.model_copy(update={"step": 10})}),
    )
    assert export(run).step == 10
    module = next(iter(adapters[10].modules))
    assert np.array_equal(read_peft_adapter(run.adapter).modules[module].b, adapters[10].modules[module].b)


def test_one_changed_byte_fails(exported):
    write_bytes(exported, UP, bytes([raw(exported, UP)[40] ^ 1]), offset=40)
    assert "was changed since" in failed(exported)["files"]


def test_one_changed_value_fails_even_where_the_checksums_know_nothing(exported):
    write_bytes(exported, UP, bytes([raw(exported, UP)[40] ^ 1]), offset=40)  # one step of bfloat16
    record_again(exported)
    assert failed(exported) == {"values": f"{UP} has 1 values that are not W + scale * B A"}


def test_two_swapped_tensors_fail(exported):
    other = UP.replace("up_proj", "gate_proj")
    one, two = raw(exported, UP), raw(exported, other)
    write_bytes(exported, UP, two)
    write_bytes(exported, other, one)
    record_again(exported)
    names = failed(exported)
    assert names.keys() == {"values"}
    assert UP in names["values"] and other in names["values"]


def test_a_tensor_that_kept_the_bases_weights_fails(exported):
    place = open_checkpoint(exported.recipe.checkpoint).places[UP]
    write_bytes(exported, UP, place.file.read_bytes()[place.begin : place.end])
    record_again(exported)
    assert failed(exported)["tensors"] == f"{UP} has an adapter and is the base's"


@pytest.mark.parametrize(("weak", "passes"), [(1, True), (None, False)])
def test_an_adapter_lost_in_rounding_is_said_and_fails_only_where_all_of_it_is(make_run, adapter_of, weak, passes):
    """The merge is right there, and PEFT's has the same bits."""
    adapter = adapter_of("tiny-12b")
    names = list(adapter.modules)[:weak]
    weaker = {name: replace(adapter.modules[name], b=adapter.modules[name].b * np.float32(1e-9)) for name in names}
    run = make_run("tiny-12b", steps={20: replace(adapter, modules=dict(adapter.modules) | weaker)})
    export(run)
    if passes:
        detail = {check.name: check.detail for check in verify(run).checks}["tensors"]
        assert (
            "; 1 more have adapters so weak that rounding gives the base's weights again (layers.0.self_attn" in detail
        )
    else:
        assert "changes nothing: rounding gives the base's weights again in all 26 tensors" in failed(run)["tensors"]


def test_a_tensor_that_no_adapter_changes_must_be_the_bases(exported):
    name = "model.language_model.layers.0.input_layernorm.weight"
    write_bytes(exported, name, bytes([raw(exported, name)[0] ^ 1]))
    record_again(exported)
    assert failed(exported) == {"tensors": f"{name} differs from the base and has no adapter"}


def test_a_file_too_many_or_too_few_fails(exported):
    (exported.merged / "notes.txt").write_text("mine")
    (exported.merged / "generation_config.json").unlink()
    assert failed(exported)["files"] == "merged/generation_config.json is missing; merged/notes.txt was not exported"


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja", "new.json"])
def test_what_is_no_weight_is_compared_with_the_base_even_where_the_checksums_know_nothing(exported, name):
    (exported.merged / name).write_text("{}")
    record_again(exported)
    verdict = "is not in the base" if name == "new.json" else "is not the base's"
    assert failed(exported) == {"other files": f"{name} {verdict}"}


@pytest.mark.parametrize("dtype", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_run_on_a_quantised_base_is_merged_into_what_it_was_trained_on(make_run, adapter_of, dtype):
    """Of an adapter on q alone: what has none is dequantized, too, as it was in training."""
    adapter = adapter_of("tiny-12b")
    only_q = {name: pair for name, pair in adapter.modules.items() if name.endswith("q_proj")}
    run = make_run("tiny-12b", steps={20: replace(adapter, modules=only_q)}, targets=["q"])
    run = with_keys(run, train={"dtype": dtype})
    record = export(run)
    base, merged = open_checkpoint(run.recipe.checkpoint), open_checkpoint(str(run.merged))
    held = as_trained(base, run.recipe.train)
    assert record.merged_into == "trained" and record.merged_tensors == len(only_q)
    others = [name for name, place in base.places.items() if not place.held and not held.places[name].held]
    assert record.copied_tensors == len(others) and read_peft_adapter(run.adapter).quantized == dtype
    for name, place in held.places.items():
        expected = place.read()
        if (pair := only_q.get(name.removesuffix(".weight"))) is not None:
            delta = np.float32(adapter.scale) * (pair.b @ pair.a)
            expected = (delta + expected.astype(np.float32)).astype(expected.dtype)
        np.testing.assert_array_equal(merged.read(name), expected, err_msg=name)
    verified = verify(run)
    assert verified.passed and verified.changed_tensors == len(only_q)
    assert (
        "tensors differ from the base, dequantized as it was trained on"
        in {c.name: c.detail for c in verified.checks}["tensors"]
    )
    write_bytes(run, UP, bytes([raw(run, UP)[40] ^ 1]), offset=40)
    record_again(run)
    assert failed(run) == {"tensors": f"{UP} differs from the base and has no adapter"}


def test_the_original_weights_take_a_quantised_runs_adapter_where_that_is_asked_for(make_run):
    plain = make_run("tiny-12b")
    export(plain)
    expected = {file.name: file.read_bytes() for file in plain.merged.iterdir()}
    for keys in (
        {"train": {"dtype": "nf4"}, "export": {"merge_into": "original"}},
        {"export": {"merge_into": "original"}},
    ):
        run = with_keys(plain, **keys)
        assert export(run).merged_into == "original"
        assert {file.name: file.read_bytes() for file in run.merged.iterdir()} == expected
        assert verify(run).passed
    write_record(run, read_record(run, ExportRecord).model_copy(update={"merged_into": "trained"}))
    assert failed(with_keys(run, train={"dtype": "nf4"})).keys() == {"values"}


def test_losses_of_base_trained_and_exported_are_measured_on_the_rows(make_run):
    run = make_run("tiny-12b")
    prepare_data(run)
    export(run)
    record = verify(run)
    losses = record.losses
    assert record.checks[-1].name == "loss" and losses.targets > 50
    assert losses.exported == pytest.approx(losses.trained, abs=0.02)
    assert abs(losses.base - losses.trained) > 0.05  # a random adapter moves it
    quantized = with_keys(run, train={"dtype": "nf4"})
    export(quantized)
    trained = verify(quantized).losses
    assert trained.exported == pytest.approx(trained.trained, abs=0.02) and abs(trained.base - losses.base) > 0.005
    original = with_keys(quantized, export={"merge_into": "original"})
    export(original)
    other = verify(original).losses
    assert (other.base, other.trained) == pytest.approx((trained.base, trained.trained), abs=1e-4)
    assert other.exported == pytest.approx(losses.exported, abs=1e-4)


def test_a_missing_shard_fails(exported):
    (exported.merged / "model-00002-of-00002.safetensors").unlink()
    names = failed(exported)
    assert "is missing" in names["files"]
    assert "model-00002-of-00002.safetensors is missing" in names["readable"]


def test_another_adapter_than_the_trained_one_fails(exported, adapter_of):
    write_peft_adapter(adapter_of("tiny-12b", seed=5), exported.adapter, "base")
    record_again(exported)
    names = failed(exported)
    assert names.keys() == {"adapter", "values"}
    assert "is not what step 20 saved" in names["adapter"]


def test_another_alpha_than_the_trained_one_fails(exported):
    file = exported.adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 9}))
    record_again(exported)
    assert failed(exported)["adapter"] == "rank and alpha are 4, 9; trained were 4, 8"


def test_another_scale_than_the_trained_one_fails(exported):
    file = exported.adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    assert failed(exported)["adapter"] == "use_rslora is True, trained was False"


def test_an_adapter_of_zeros_fails(exported, adapter_of):
    adapter = adapter_of("tiny-12b")
    zero = {name: LoraPair(a=pair.a, b=np.zeros_like(pair.b)) for name, pair in adapter.modules.items()}
    write_peft_adapter(type(adapter)(modules=zero, rank=adapter.rank, alpha=adapter.alpha), exported.adapter, "base")
    record_again(exported)
    names = failed(exported)
    assert "times the norm of its weight" in names["norms"]
    assert "values" in names and "adapter" in names


def test_a_zero_adapter_is_never_exported(make_run, adapter_of):
    adapter = adapter_of("tiny-12b")
    zero = {name: LoraPair(a=pair.a, b=np.zeros_like(pair.b)) for name, pair in adapter.modules.items()}
    run = make_run(steps={1: type(adapter)(modules=zero, rank=adapter.rank, alpha=adapter.alpha)})
    with pytest.raises(CheckpointError, match="all zero"):
        export(run)
    assert not run.adapter.exists() and not run.merged.exists() and not run.record_file("export").exists()


def test_a_checkpoint_that_training_has_deleted_is_said_and_not_failed(exported):
    shutil.rmtree(exported.checkpoints / "20")
    record = verify(exported)
    assert record.passed
    assert [(check.name, check.passed) for check in record.checks if check.passed is not True] == [("adapter", None)]
    assert "step 20 is no longer" in record.checks[2].detail


def test_another_base_than_the_one_exported_from_fails(exported, adapter_of):
    record = read_record(exported, ExportRecord)
    write_record(exported, record.model_copy(update={"base_sha256": "0" * 64}))
    assert "has the fingerprint" in failed(exported)["base"]


def test_logits_tell_a_wrong_merge_by_themselves(exported, monkeypatch):
    write_bytes(exported, UP, bytes(2000))
    record_again(exported)
    monkeypatch.setattr(verify_module, "recompute", lambda *_: ([], None))
    names = failed(exported)
    assert names.keys() == {"logits"}


def test_a_large_matrix_is_sampled_from_its_first_row_to_its_last(monkeypatch, exported):
    monkeypatch.setattr(verify_module, "_WHOLE_VALUES", 10)
    monkeypatch.setattr(verify_module, "_BLOCK_VALUES", 200)
    place = open_checkpoint(str(exported.merged)).places[UP]
    rows = verify_module._sample(place)
    assert len(rows) == verify_module._SAMPLED_BLOCKS
    assert rows[0].start == 0 and rows[-1].stop == place.shape[0]


def test_export_records_what_it_wrote(exported):
    record = read_record(exported, ExportRecord)
    assert {file.name: file.sha256 for file in record.merged} == {
        file.name: sha256_file(file) for file in exported.merged.iterdir()
    }
    assert set(stage_module.PACKAGES) <= record.provenance.versions.keys()
