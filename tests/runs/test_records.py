"""Records to and from JSON, and what is said of a file that is none."""

import json
from pathlib import Path

import pytest

from gemsmith.errors import RunError, VersionError
from gemsmith.runs.records import (
    SCHEMA_VERSION,
    Computer,
    Provenance,
    ServeRecord,
    TrainRecord,
    TrainStep,
    read_record_file,
)

PROVENANCE = Provenance(
    started="2026-01-01T00:00:00+00:00",
    duration_s=1.5,
    gemsmith="0",
    versions={"jax": "0"},
    machine=Computer(system="s", processor="p", cores=1, memory_bytes=1),
    seed=0,
    inputs_sha256={},
)
RECORD = ServeRecord(provenance=PROVENANCE, url="u", model="m", command=("a", "b"), start_s=0.1, vllm="0", answer="é\n")


def read(file):
    return read_record_file(file, ServeRecord, missing="make it", damaged="make it again")


def test_a_record_comes_back_from_its_json(tmp_path):
    file = tmp_path / "serve.json"
    file.write_text(RECORD.model_dump_json())
    assert read(file) == RECORD and RECORD.schema_version == SCHEMA_VERSION and RECORD.warnings == ()


def test_a_loss_that_is_no_number_comes_back_as_it_was():
    step = TrainStep(step=1, loss=float("nan"), grad_norm=float("inf"), learning_rate=1e-4, real_tokens=3, step_s=0.1)
    again = TrainStep.model_validate(json.loads(step.model_dump_json()))
    assert again.loss != again.loss and again.grad_norm == float("inf")


@pytest.mark.parametrize(
    ("change", "place"),
    [({"start_s": "soon"}, "start_s: "), ({"unknown": 1}, "unknown: "), ({"status": "begun"}, "status: ")],
)
def test_a_record_that_does_not_fit_is_refused_by_its_field_with_what_to_do(tmp_path, change, place):
    file = tmp_path / "serve.json"
    file.write_text(json.dumps(RECORD.model_dump(mode="json") | change))
    with pytest.raises(RunError, match=rf"is not a record of this version \({place}.*\); make it again$") as refused:
        read(file)
    assert not isinstance(refused.value, VersionError)


def test_where_export_looks_is_a_saved_step(tmp_path):
    whole = json.loads((Path(__file__).parents[2] / "benchmarks" / "records" / "demo" / "train.json").read_text())
    for place in ("/etc", "../../../base", "checkpoints/-1", ""):
        (tmp_path / "train.json").write_text(json.dumps(whole | {"last_checkpoint": place}))
        with pytest.raises(RunError, match=r"is not a record of this version \(last_checkpoint: "):
            read_record_file(tmp_path / "train.json", TrainRecord, missing="", damaged="")


def test_a_file_that_is_missing_or_half_written_says_so(tmp_path):
    with pytest.raises(RunError, match=r"serve\.json: does not exist; make it$"):
        read(tmp_path / "serve.json")
    (tmp_path / "serve.json").write_text(RECORD.model_dump_json()[:-9])
    with pytest.raises(RunError, match="is not a record of this version"):
        read(tmp_path / "serve.json")


def test_a_record_of_another_version_names_the_gemsmith_that_wrote_it(tmp_path):
    file = tmp_path / "serve.json"
    values = RECORD.model_dump(mode="json") | {"schema_version": SCHEMA_VERSION + 1}
    file.write_text(json.dumps(values))
    with pytest.raises(VersionError, match=rf"has schema_version {SCHEMA_VERSION + 1}, .* open it with Gemsmith 0, or"):
        read(file)
