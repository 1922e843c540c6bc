import json
import os
from pathlib import Path

from gemsmith.plan.counts import count_evaluations, count_real_tokens, count_steps
from gemsmith.recipe.load import build_recipe, load_recipe
from gemsmith.runs.records import Computer, DataRecord, EvalRows, Provenance

ROOT = Path(__file__).parents[2]


def recipe(train="rows.jsonl", *, packing=False, max_length=100, **train_section):
    values = {"checkpoint": "x", "data": {"train": train, "packing": packing, "max_length": max_length}}
    return build_recipe(values | {"train": {"global_batch_size": 4, **train_section}})


def data_record(steps):
    machine = Computer(system="s", processor="p", cores=1, memory_bytes=1)
    provenance = Provenance(
        started="t", duration_s=0, gemsmith="0", versions={}, machine=machine, seed=0, inputs_sha256={}
    )
    counts = {"rows": 9, "packed_rows": 7, "tokens": 1, "supervised_tokens": 1, "steps": steps}
    rest = {
        "dropped": {},
        "packing_efficiency": 1,
        "length_percentiles": {},
        "template_sha256": "a",
        "rows_sha256": "b",
    }
    return DataRecord(provenance=provenance, **counts, **rest)


def test_the_recipes_own_number_comes_first():
    assert count_steps(recipe(max_steps=17), data_record(5))[0] == 17


def test_then_what_the_data_stage_counted():
    counted = count_steps(recipe(), data_record(5))
    assert counted[0] == 5 and "counted by the data stage" in counted[1]


def test_then_the_lines_of_a_file_whose_rows_stay_apart(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "p", "response": "r"}) for _ in range(9)) + "\n\n")
    counted = count_steps(recipe(str(file), epochs=2))
    assert counted[0] == 5, "ceil(2 * 9 / 4)"
    assert "estimated: rows.jsonl has 9 documents" in counted[1]


def test_evaluations_are_counted_and_so_are_their_batches(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "p", "response": "r"}) for _ in range(40)) + "\n")
    data = {"train": str(file), "eval": str(file), "held_out": 0.25, "packing": False, "max_length": 100}
    train = {"global_batch_size": 4, "eval_steps": 10, "epochs": 3, "max_steps": 25}
    found = build_recipe({"checkpoint": "x", "data": data, "train": train})
    assert count_evaluations(found, None, 25) == (3, 3), "after 10, 20 and 25; ten rows, four at a time"
    rows = EvalRows(rows=9, dropped={}, packed_rows=5, tokens=1, supervised_tokens=1, rows_sha256="", files={})
    assert count_evaluations(found, data_record(5).model_copy(update={"eval_rows": rows}), 20) == (2, 2)
    elsewhere = build_recipe({"checkpoint": "x", "data": data | {"eval": "hub:a/b", "held_out": 0}, "train": train})
    assert count_evaluations(elsewhere, None, 25) == (3, None)
    assert count_evaluations(recipe(), None, 25) == (0, 0)


def test_rows_that_the_recipe_leaves_out_make_no_steps(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(("z" * 349 + "\n") * 80)
    values = {"train": str(file), "eval": str(file), "held_out": 0.25, "max_length": 100, "packing": False}
    for packing, limit, steps in ((False, None, 15), (False, 8, 2), (True, 8, 2)):
        data = values | {"limit": limit, "packing": packing}
        counted = count_steps(build_recipe({"checkpoint": "x", "data": data, "train": {"global_batch_size": 4}}))
        assert counted[0] == steps and f"of which {steps * 4} are trained on" in counted[1]


def test_packed_rows_are_judged_by_bytes_and_never_more_than_documents(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("x" * 34 + "\n" + "y" * 34 + "\n" * 20)
    short = count_steps(recipe(str(file), packing=True, global_batch_size=1))
    assert short[0] == 1 and "3.5 bytes a token" in short[1]
    file.write_text(("z" * 349 + "\n") * 95)
    assert count_steps(recipe(str(file), packing=True, global_batch_size=1))[0] == 95, (
        "95 documents of 100 tokens need 100 rows of 95 tokens"
    )
    file.write_text(("z" * 34 + "\n") * 950)
    assert count_steps(recipe(str(file), packing=True, global_batch_size=1))[0] == 100


def test_a_large_file_is_judged_by_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr("gemsmith.plan.counts.SAMPLE_BYTES", 100)
    file = tmp_path / "rows.jsonl"
    file.write_text("123456789\n" * 400)
    counted = count_steps(recipe(str(file)))
    assert counted[0] == 100 and "about 400 documents" in counted[1]


def test_made_rows_are_known_or_estimated_where_they_are_packed(tmp_path):
    assert count_steps(recipe({"task": "verilog", "rows": 10}))[0] == 3
    made = {"task": "verilog", "rows": 2400}
    counted = count_steps(recipe(made, packing=True, max_length=256))
    assert 0.6 < counted[0] / 265 < 1.5 and "an assumed 3.5 bytes a token" in counted[1]
    own = tmp_path / "own.py"
    own.write_text("raise SystemExit('was run')")
    unknown = count_steps(recipe({"task": str(own), "rows": 10}, packing=True))
    assert unknown[0] is None and "for 1,000 steps" in unknown[1] and "counted by the data stage" in unknown[1]


def test_a_demo_is_planned_as_about_as_many_steps_as_it_takes():
    """265, as benchmarks/records/demo/data.json has them."""
    counted = count_steps(load_recipe(ROOT / "recipes" / "demo.yaml"))
    assert 0.8 < counted[0] / 265 < 1.2 and "2.3 bytes a token, as the checkpoint's tokenizer has it" in counted[1]


def test_what_is_not_there_or_not_lines_is_unknown_and_says_so(tmp_path):
    assert "is not there yet" in count_steps(recipe(str(tmp_path / "none.jsonl")))[1]
    assert count_steps(recipe("org/dataset"))[0] is None
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "no file that can be read" in count_steps(recipe(str(tmp_path / "pipe.jsonl")))[1]
    (tmp_path / "empty.jsonl").touch()
    assert "is empty" in count_steps(recipe(str(tmp_path / "empty.jsonl")))[1]


def test_real_tokens_are_those_that_the_data_stage_counted():
    data = data_record(5).model_copy(update={"packing_efficiency": 0.25})
    real, reason = count_real_tokens(recipe(), data)
    assert real == 4 * recipe().data.max_length / 4 and "counted by the data stage" in reason


def test_real_tokens_of_rows_that_nobody_counted_are_assumed_or_unknown():
    assert "95 % of its" in count_real_tokens(recipe(packing=True))[1]
    assert count_real_tokens(recipe())[0] is None
