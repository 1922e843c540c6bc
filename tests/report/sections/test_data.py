"""The data's facts: rows, tokens, what was dropped, images, and what is held out too."""

from gemsmith.analysis.summary import read_findings
from gemsmith.report import sections as data
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.records import DataRecord, HeldOut
from gemsmith.runs.run import read_record, write_record


def test_rows_are_counted_with_those_that_were_dropped_and_why(large_run, section_words):
    words = section_words(large_run, "data")
    assert "Left out of 10,003 rows" in words and "too long (over 4096 tokens) 41 no assistant turn 3" in words
    assert "column id, not read rows that have a value there 10,003" in words
    for fact in ("Rows read 10,003", "Rows trained on 9,959", "Packed rows 9,952", "Rows in a packed row, mean 1.00"):
        assert fact in words, fact
    for fact in ("Images 812", "Soft tokens an image, mean 280", "Patches of a row, at most 5,040"):
        assert fact in words, fact


def test_images_are_left_out_where_there_are_none(make_run, section_words):
    words = section_words(make_run(steps=2), "data")
    assert "Images" not in words and "Soft tokens" not in words


def test_what_was_compared_of_held_out_rows_is_said_and_what_was_not(make_run, section_words):
    run = make_run(steps=2)
    assert "nearly trained on" not in section_words(run, "data")
    held_out = HeldOut(rows=200, same_prompt=7, same_answer=3, same_image=11)
    write_record(run, read_record(run, DataRecord).model_copy(update={"held_out": held_out}))
    words = section_words(run, "data")
    assert "Held out, prompt and answer trained on 3 of 200 rows" in words
    assert "Held out, an image of it trained on 11 of 200 rows" in words
    assert "Held out and nearly trained on not looked for" in words


def test_contamination_is_what_eval_saw_or_else_what_data_saw_or_not_told(make_run):
    def shared(prepared, scored):
        write_record(run, read_record(run, DataRecord).model_copy(update={"held_out_also_trained": prepared}))
        write_record(run, read_record(run, EvalRecord).model_copy(update={"held_out_also_trained": scored}))
        return data.make_data(read_findings(run))["shared"]

    run = make_run(steps=2)
    assert shared(None, None) == "not told: no held-out rows were there to compare with"
    assert shared(5, 0) == "none of the rows that were scored has a prompt that is trained on"
    assert shared(5, None) == "5 of the rows that data.eval named have a prompt that is trained on"
