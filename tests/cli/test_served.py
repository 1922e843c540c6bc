"""What the verbs serve, bench and eval refuse before anything is started."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--task", "verilog"], "--dataset"),
        (["eval", "--force", "--answers", "x"], "are for a run: give SOURCE"),
        (["eval", "runs/x", "--lm-eval-tasks", "tasks"], "--lm-eval-tasks: goes with --lm-eval TASK"),
        (["eval", "runs/x", "--lm-eval", "arc", "--samples", "2"], "--lm-eval goes without the options of --task"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(gemsmith, arguments, message):
    code, _, err = gemsmith(*arguments)
    assert code == 2 and message in err and err.count("\n") == 1
