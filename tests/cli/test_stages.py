import json
import os
import subprocess
import sys


def test_data_writes_its_record_and_the_resolved_recipe(gemsmith, recipe, tmp_path):
    code, out, _ = gemsmith("data", recipe, "--json", "--run", "out")
    record = json.loads(out)
    assert (code, record["rows"], record["dropped"]) == (0, 20, {})
    assert json.loads((tmp_path / "out" / "data.json").read_text()) == record
    assert (
        'model: "tiny-31b"  # read from the checkpoint\'s config.json' in (tmp_path / "out" / "recipe.yaml").read_text()
    )


def test_a_complete_stage_is_not_done_again_unless_forced(gemsmith, recipe, tmp_path):
    gemsmith("data", recipe)
    file = tmp_path / "runs" / "my" / "data.json"
    before = file.read_bytes()
    assert "--force" in gemsmith("data", recipe)[2]
    assert file.read_bytes() == before
    gemsmith("data", "runs/my", "--force")
    assert json.loads(file.read_bytes())["rows_sha256"] == json.loads(before)["rows_sha256"]


def test_a_forced_stage_that_fails_leaves_the_earlier_one_whole(gemsmith, recipe, tmp_path):
    gemsmith("data", recipe)
    run = tmp_path / "runs" / "my"
    before = {file: file.read_bytes() for file in (run / "data.json", *sorted((run / "data").iterdir()))}
    code, _, err = gemsmith("data", recipe, "--set", "data.max_length=8", "--force")
    assert code == 2 and "so none is left" in err
    assert {file: file.read_bytes() for file in before} == before
    assert "data is complete" in gemsmith("data", recipe)[2]


def test_stopped_once_rows_are_replaced_no_record_tells_of_other_rows(gemsmith, recipe, tmp_path, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    gemsmith("data", recipe)
    with monkeypatch.context() as patch:
        patch.setattr("gemsmith.data.stage.make_provenance", stop)
        assert gemsmith("data", "runs/my", "--force")[0] == 130
    assert not (tmp_path / "runs" / "my" / "data.json").exists()
    assert gemsmith("data", recipe)[0] == 0


def test_another_recipe_in_the_same_run_directory_is_refused(gemsmith, recipe):
    gemsmith("data", recipe)
    code, _, err = gemsmith("data", recipe, "--set", "data.max_length=128")
    assert code == 2 and "data.max_length is 256 there and 128 here, and data has used it" in err
    assert gemsmith("data", recipe, "--set", "data.max_length=512", "--force")[0] == 0
    assert "data is complete" in gemsmith("data", recipe, "--set", "data.max_length=512")[2]


def test_rows_that_changed_since_they_were_read_are_refused(gemsmith, recipe, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hi", "response": "hello"}\n')
    assert gemsmith("data", recipe, "--set", f"data.train={rows}")[0] == 0
    assert gemsmith("data", "runs/my")[0] == 0
    rows.write_text('{"prompt": "hi", "response": "hello there"}\n')
    code, _, err = gemsmith("data", "runs/my")
    assert code == 2 and "has changed since" in err
    assert gemsmith("data", "runs/my", "--force")[0] == 0


def test_rows_are_shown_with_what_is_trained_on(gemsmith, recipe):
    code, out, _ = gemsmith("data", recipe, "--show", 1)
    assert code == 0
    assert "module" in out and "<turn|>" in out


def test_rows_are_shown_where_the_locale_has_no_such_letters(gemsmith, recipe):
    assert gemsmith("data", recipe)[0] == 0
    command = [sys.executable, "-m", "gemsmith", "data", str(recipe), "--show", "1"]
    shown = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, check=False, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert r"\u27e6" in shown.stdout


def test_a_report_of_a_run_with_quotes_in_its_name_is_json(gemsmith, recipe):
    assert gemsmith("data", recipe, "--run", 'runs/"a"')[0] == 0
    code, out, _ = gemsmith("report", 'runs/"a"', "--json")
    assert code == 0 and json.loads(out) == {"report": 'runs/"a"/report.html'}


ODD = "[/a]\x1b[31m\x9b\u202e"


def test_a_run_named_like_markup_or_colors_is_shown_as_it_is_called(gemsmith, recipe):
    for _ in range(2):
        code, out, err = gemsmith("data", recipe.name, "--run", ODD, "--show", 1)
        assert code == 0, err
        assert not set(ODD[4:]) & set(out + err) - set("[31m")
    assert r"data is complete in [/a]\x1b[31m\x9b\u202e" in err
    code, out, err = gemsmith("report", ODD)
    assert code == 0 and out.endswith("[/a]\\x1b[31m\\x9b\\u202e/report.html\n")
