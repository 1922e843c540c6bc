"""Training's facts: every number of the page is the record's."""

from dataclasses import replace

from gemsmith.analysis.summary import read_findings
from gemsmith.report import sections as training
from gemsmith.runs.records import Extension, TrainRecord
from gemsmith.runs.run import read_record, write_record
from gemsmith.system.format import count, decimal, duration


def test_steps_of_a_long_run_are_spread_with_the_first_and_the_last(large_run, undrawn):
    made = training.make_training(read_findings(large_run))
    steps = [step.step for step in made["step_rows"]]
    assert len(steps) == 24 and (steps[0], steps[-1]) == (1, 1_244)
    assert made["tokens"] == sum(step.real_tokens for step in read_record(large_run, TrainRecord).steps)


def test_the_page_s_numbers_are_the_record_s(large_run, section_words):
    train, words = read_record(large_run, TrainRecord), section_words(large_run, "training")
    step = train.steps[-1]
    row = f"{count(step.step)} {decimal(step.loss)} {decimal(step.grad_norm)} {decimal(step.learning_rate)} "
    row += f"{count(step.real_tokens)} {duration(step.step_s)}"
    assert " ".join(row.split()) in words
    assert f"Real tokens, all but padding {count(sum(step.real_tokens for step in train.steps))}" in words
    assert f"Tokens in the loss {count(sum(step.loss_tokens for step in train.steps))}" in words
    assert "Token accuracy, last step 90.0 %" in words
    assert "Mesh fsdp 4" in words and "Spikes 1" in words and "Updates left out 1" in words


def test_the_step_that_is_kept_and_an_early_end_are_told(make_run, section_words):
    run = make_run(steps=12)
    train = read_record(run, TrainRecord)
    assert "Checkpoint for export checkpoints/12, the last" in section_words(run, "training")
    early = "ended after step 12 of 20: no held-out loss below 1.5000"
    write_record(
        run, train.model_copy(update={"kept": "best", "last_checkpoint": "checkpoints/8", "early_stop": early})
    )
    more = Extension(after=4, planned_steps=4, steps=20)
    write_record(run, read_record(run, TrainRecord).model_copy(update={"extensions": (more,)}))
    words = section_words(run, "training")
    assert "After step 4 it was given 20 steps instead of 4: from there on" in words
    assert "Checkpoint for export checkpoints/8, of the lowest held-out loss" in words and f"Training {early}." in words


def test_tokens_in_the_loss_of_a_record_that_has_none_are_no_number(large_run, undrawn):
    findings = read_findings(large_run)
    old = tuple(step.model_copy(update={"loss_tokens": None}) for step in findings.train.steps)
    assert training.make_training(findings)["loss_tokens"] == sum(step.loss_tokens for step in findings.train.steps)
    findings = replace(findings, train=findings.train.model_copy(update={"steps": old}))
    assert training.make_training(findings)["loss_tokens"] is None
