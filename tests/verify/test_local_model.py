"""What a run's model answers in this process, without a server."""

from dataclasses import replace

import pytest

import gemsmith
from gemsmith.errors import DataError, InputError, RunError
from gemsmith.export.stage import export
from gemsmith.runs.records import ExportRecord
from gemsmith.runs.run import read_record, write_record
from support.images import image_bytes

PROMPT = "module adder"


def test_the_adapter_answers_what_merged_weights_do_and_the_base_something_else(make_run):
    run = make_run("tiny-12b", "float32")
    export(run)
    base, adapter, merged = (gemsmith.load_model(run, weights) for weights in ("base", "adapter", "merged"))
    answers = [model.generate(PROMPT, max_new_tokens=6) for model in (base, adapter, merged)]
    assert answers[1] == answers[2] != answers[0]
    assert merged.generate([{"role": "user", "content": PROMPT}], max_new_tokens=6) == answers[2]
    assert len(merged.generate(PROMPT, max_new_tokens=12)) > len(answers[2])
    assert merged.generate(PROMPT, max_new_tokens=6, do_sample=True, temperature=50.0) != answers[2]


def test_images_are_where_a_row_has_them(photo_run, tmp_path):
    model = gemsmith.load_model(photo_run(), "base")
    wide, tall = tmp_path / "wide.png", image_bytes(48, 96, seed=2)
    wide.write_bytes(image_bytes(96, 48, seed=1))
    seen = []
    generate = model.model.generate
    model.model.generate = lambda **inputs: seen.append(inputs) or generate(**inputs)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which?"}]
    answers = [
        model.generate("Which?", [wide, tall], max_new_tokens=4),
        model.generate([{"role": "user", "content": content}], [wide, tall], max_new_tokens=4),
    ]
    assert answers[0] == answers[1]
    inputs = seen[0]
    soft = int(inputs["mm_token_type_ids"].sum())
    assert soft == int((inputs["image_position_ids"][..., 0] >= 0).sum()) // model.patching.per_token
    assert inputs["pixel_values"].shape[0] == 2
    assert all(inputs[name].equal(seen[1][name]) for name in ("input_ids", "pixel_values"))
    with pytest.raises(DataError, match=r"^generate: an image does not exist"):
        model.generate("Which?", [wide, tmp_path / "none.png"])
    with pytest.raises(DataError, match=r"holds <turn\|>, a control token"):
        model.generate("<turn|>")


def test_weights_that_are_not_there_or_of_other_settings_are_refused(exported_run):
    run = exported_run()
    with pytest.raises(InputError, match=r"^load_model: 'mergd' was given \(did you mean merged\?\); allowed: base"):
        gemsmith.load_model(run, "mergd")
    quantized = replace(run, recipe=run.recipe.override({"train.dtype": "nf4"}))
    with pytest.raises(InputError, match=r"was trained on a base in nf4, .* the original weights here; give 'merged'$"):
        gemsmith.load_model(quantized, "adapter")
    record = read_record(run, ExportRecord)
    provenance = record.provenance.model_copy(
        update={"inputs_sha256": record.provenance.inputs_sha256 | {"recipe": "another"}}
    )
    write_record(run, record.model_copy(update={"provenance": provenance}))
    with pytest.raises(RunError, match=r"export\.json: was made from other settings; run: gemsmith export "):
        gemsmith.load_model(run)
    run.record_file("export").unlink()
    with pytest.raises(RunError, match="run first: gemsmith export "):
        gemsmith.load_model(run, "adapter")
