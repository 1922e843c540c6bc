"""What was run: settings, machines, versions."""

import pytest

from gemsmith.analysis.summary import read_findings
from gemsmith.recipe.load import build_recipe
from gemsmith.report import sections as about
from gemsmith.runs.records import TrainRecord


@pytest.mark.parametrize(
    ("keys", "trained", "expected"),
    [
        ({}, None, "warm-up in a tenth of the steps, at most 100"),
        ({}, 2, "2 warm-up steps"),
        ({"warmup_steps": 7}, None, "7 warm-up steps"),
        ({"warmup_ratio": 0.03}, 1, "warm-up in 3 % of the steps"),
    ],
)
def test_warmup_is_what_training_made_of_it(keys, trained, expected):
    record = None if trained is None else TrainRecord.model_construct(warmup_steps=trained)
    recipe = build_recipe({"checkpoint": "x", "data": {"train": "x"}, "optimizer": keys})
    assert dict(about._settings(recipe, record))["AdamW"].split(", ")[2:-2] == expected.split(", ")


def test_machines_and_versions_are_those_of_the_records(large_run):
    made = about.make_about(read_findings(large_run))
    (_, others), (trained, stages) = made["machines"]
    assert stages == ["train"] and trained.accelerators == ("TPU v5",) * 4 and "train" not in others
    assert made["versions"]["vllm"] == ["0.32.0"] and next(iter(made["versions"])) == "gemsmith"
