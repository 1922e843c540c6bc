"""What training gained and merged/ has lost: told, and by the recipe's choice a failure."""

import pytest

from gemsmith.runs.records import Losses
from gemsmith.verify.checks import check_losses


def losses(exported: float, *, base: float = 7.470, trained: float = 7.102) -> Losses:
    return Losses(base=base, trained=trained, exported=exported, targets=412)


def test_where_nothing_was_gained_nothing_is_lost():
    for found in (losses(7.102), losses(7.6, trained=7.47), losses(7.6, trained=7.5)):
        check, warnings = check_losses(found, dtype="nf4", original=True)
        assert check.passed and not warnings


def test_all_three_losses_are_said_and_nothing_else_where_little_is_lost():
    check, warnings = check_losses(losses(7.110), dtype="nf4", original=True)
    assert check.passed and not warnings
    assert check.detail == (
        "base 7.470 as it was trained on (nf4), trained 7.102, exported 7.110, over 412 targets that were trained on"
    )


@pytest.mark.parametrize(("exported", "passed"), [(7.211, True), (7.285, True), (7.287, False), (7.9, False)])
def test_a_merge_into_other_weights_is_told_of_and_fails_where_half_of_the_gain_is_lost(exported, passed):
    check, (notice,) = check_losses(losses(exported), dtype="nf4", original=True)
    assert check.passed is passed and ("set export.merge_into to trained" in check.detail) is not passed
    assert "% of what training gained is lost in merged/" in notice and "merged into the original weights" in notice
    assert notice.startswith({7.211: "30 %", 7.9: "100 %"}.get(exported, "50 %"))


def test_what_rounding_loses_is_told_and_never_a_failure():
    check, (notice,) = check_losses(losses(7.9), dtype="bfloat16", original=False)
    assert check.passed and notice.endswith("by rounding.")


def test_a_gain_within_noise_is_not_spoken_of():
    check, warnings = check_losses(losses(7.109, base=7.103, trained=7.102), dtype="bfloat16", original=False)
    assert check.passed and not warnings
