"""What the verbs serve, bench and eval refuse before anything is started."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--task", "verilog"], "--dataset"),
        (["eval", "--force", "--answers", "x"], "--force: goes with SOURCE"),
        (["serve", "runs/x", "--json", "--machine", "cpu"], "--machine: does not go with --json"),
        (["bench", "--grid", "short"], "SOURCE is missing; give a recipe or run directory, or --url"),
        (["eval", "runs/x", "--lm-eval-tasks", "tasks"], "--lm-eval-tasks: goes with --lm-eval;"),
        (["eval", "runs/x", "--lm-eval", "arc", "--samples", "2"], "--samples: does not go with --lm-eval"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(gemsmith, arguments, message):
    code, _, err = gemsmith(*arguments)
    assert code == 2 and message in err and err.count("\n") == 1
