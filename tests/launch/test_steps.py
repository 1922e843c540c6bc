from gemsmith.launch.upload import cost_lines, upload_steps, worker_command


def test_the_recipe_is_uploaded_after_what_it_reads(launched, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    commands = [command for _, command in upload_steps(launched(overrides=("data.train=rows.jsonl",)))]
    assert commands[0][-2:] == (str(tmp_path / "rows.jsonl"), "gs://runs/team/big/launched/inputs/data-train/")
    assert commands[-1][-2:] == ("recipe.yaml", "gs://runs/team/big/launched/")


def test_the_greatest_bill_is_told_with_how_it_comes_about(launched):
    request = launched(timeout_hours=2, retries=1)
    assert "At most 16.48 USD for the machine: 2 h x 2 attempts" in cost_lines(request)[-1]
    assert "Estimated: " in cost_lines(request)[1]


def test_the_machine_gets_its_stages(launched):
    assert worker_command(launched(stages="data,train"), folder="/x")[-3:] == ("/x/big", "--stages", "data,train")
