"""The table of what became of every key."""

import json


def test_json_holds_the_table_and_the_recipe(tmp_path, capsys, run, settings):
    assert run(settings(tmp_path, train_on_inputs=True), "--json") == 2
    document = json.loads(capsys.readouterr().out)
    assert document["differences"] == ["settings.yaml: train_on_inputs"]
    assert document["recipe"]["lora"]["rank"] == 8
    row = next(row for row in document["rows"] if row["key"] == "micro_batch_size")
    assert (row["status"], row["sets"]) == ("derived", {"train.global_batch_size": 4})


def test_what_rich_would_read_as_markup_is_printed_as_it_is(tmp_path, capsys, run, settings):
    assert run(settings(tmp_path, output_dir="[bold]x[/]")) == 0
    assert "[bold]x[/]" in capsys.readouterr().err
