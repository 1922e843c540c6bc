import pytest

from gemsmith.cli import cli

VERBS = ["run", "plan", "data", "train", "export", "verify", "serve", "bench", "eval", "report"]


def test_every_verb_is_there_and_has_help(gemsmith):
    assert set(VERBS) <= set(cli.commands)
    for verb in VERBS:
        code, out, _ = gemsmith(verb, "--help")
        assert code == 0
        assert "--set" in out and "--json" in out and "--run" in out, verb
        assert f"  gemsmith {verb} " in out and "\\b" not in out, verb


def test_every_summary_is_whole_at_80_columns(gemsmith):
    for verbs, least in (((), 18), (("prepare",), 4)):
        summaries = gemsmith(*verbs, "--help")[1].partition("Commands:\n")[2].splitlines()
        assert len(summaries) >= least
        assert not [line for line in summaries if line.endswith("...") or not line.endswith(".") or len(line) > 80]
    assert all(len(command.short_help or "") <= 45 for command in cli.commands.values())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan", "nothing.yaml"], "nothing.yaml: is neither a recipe nor a run directory"),
        (["plan", "my.yaml", "--set", "lora.rnak=3"], "unknown key lora.rnak (did you mean rank?)"),
        (["plan", "my.yaml", "--set", "model=gemma4-31"], "did you mean gemma4-31b?"),
        (["plan", "my.yaml", "--set", "lora.rank=many"], "lora.rank: 'many' was given"),
        (["plan", "my.yaml", "--set", "model=tiny-12b"], "tiny-12b"),
        (["plan", "my.yaml", "--set", "hardware.machines=[v5p-9]"], "did you mean v5p-8"),
        (["plan", "my.yaml", "--set", "checkpoint=no/such/folder"], "is neither a folder"),
        (["plan", "my.yaml", "--set", "data.max_length=1000000"], "reads at most 2048 tokens"),
        (["data", "my.yaml", "--set", "data.train=missing.jsonl"], "missing.jsonl"),
        (["export", "my.yaml"], "train.json: does not exist; run first: gemsmith train runs/my"),
        (["report", "."], "holds no recipe.yaml"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(gemsmith, recipe, arguments, expected):
    code, out, err = gemsmith(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert expected in err


def test_a_name_as_long_as_a_damaged_file_does_not_flood_the_terminal(gemsmith, recipe, tmp_path):
    (tmp_path / "rows.csv").write_text(f"{'[' * 100_000},b\n1,2\n")
    code, _, err = gemsmith("data", recipe, "--run", tmp_path / "run", "--set", f"data.train={tmp_path / 'rows.csv'}")
    assert code == 2 and len(err) < 5000 and err.count("\n") == 1
    assert err.startswith("error: rows.csv line 2: has the columns [[[") and "[ … [" in err and "allowed: " in err
