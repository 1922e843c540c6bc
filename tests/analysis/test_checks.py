import pytest

from gemsmith.analysis.compare import check_side, needed_requests, padding_share
from gemsmith.analysis.sides import SideScore


def test_padding_is_what_tokens_leave_of_the_positions(plain_side, demo_side, demo_records):
    side = plain_side(real_tokens_per_s=763, train_hours=3.34, steps=1244, global_batch_size=8, row_tokens=3072)
    assert padding_share(side) == pytest.approx(0.70, abs=0.005)
    assert "padding took 70%" in next(check_side(side))
    # Two epochs of the demo, whose last step of each may lack rows.
    packed = 1 - demo_records["data"].packing_efficiency
    assert padding_share(demo_side()) == pytest.approx(packed, abs=0.01)
    assert not [line for line in check_side(demo_side()) if "padding" in line]


def test_more_rows_than_were_kept_are_other_rows(plain_side):
    how = {
        "steps": 1250,
        "global_batch_size": 8,
        "rows": 9959,
        "conditions": {"data.packing": "false", "train.epochs": "1"},
    }
    assert "10,000 rows in 1 epoch, and 9,959 were kept" in next(check_side(plain_side(**how)))
    assert list(check_side(plain_side(**how | {"steps": 1244}))) == []
    twice = how | {"conditions": {"data.packing": "false", "train.epochs": "2"}}
    assert list(check_side(plain_side(**twice))) == []


def test_dollars_that_do_not_follow_from_hours_are_found(plain_side, rented):
    how = {"train_hours": 2.0, "train_rates": rented(10.0), "real_tokens_per_s": 1000.0}
    assert list(check_side(plain_side(**how, usd=20.1, usd_per_million_tokens=2.78))) == []
    wrong = list(check_side(plain_side(**how, usd=30.0, usd_per_million_tokens=9.0)))
    assert wrong == [
        "its cost of 30.00 USD is not hours × price, 20.00 USD.",
        "its 9.00 USD a million tokens is not cost / tokens, 2.78 USD.",
    ]


def test_thirty_requests_are_too_few_for_any_load(plain_side, cell):
    for load in ({}, {"request_rate": 4.0}, {"max_concurrency": 64}, {"asked": "rate not said"}):
        assert needed_requests(cell(**load)) >= 200
        assert "too few requests" in next(check_side(plain_side(cells=(cell(requests=30, **load),))))
        assert list(check_side(plain_side(cells=(cell(requests=500, **load),)))) == []


def test_scores_without_base_or_interval_are_said(plain_side):
    bare = SideScore(task="t", name="t, tuned", value=0.6, questions=100)
    assert len(list(check_side(plain_side(scores=(bare,))))) == 2
    whole = bare.model_copy(update={"low": 0.5, "high": 0.7})
    base = whole.model_copy(update={"name": "t, base"})
    assert list(check_side(plain_side(scores=(whole, base)))) == []


def test_a_ttft_that_no_chip_can_make_is_named(plain_side, cell):
    fast, slow, unsaid = cell(ttft_ms=6.3), cell(ttft_ms=6.5), cell(ttft_ms=None)
    side = plain_side(cells=(fast, slow, unsaid), prompt_token_s=1e-4, served_on="1xh100")
    (line,) = side.below_the_floor()
    assert "its TTFT of 6.3 ms (64 in, 32 out, a burst) is below the floor of 6.4 ms" in line and "1xh100" in line
    assert not list(side.model_copy(update={"prompt_token_s": None}).below_the_floor())
    longer = fast.model_copy(update={"real_input_tokens": 60.0})
    assert not list(side.model_copy(update={"cells": (longer,)}).below_the_floor())


def test_more_right_than_the_questions_without_a_right_answer_leave(plain_side):
    score = SideScore(task="t", name="t pass@5, base", value=0.8, low=0.7, high=0.9, questions=100, none_right=30)
    (line,) = check_side(plain_side(scores=(score,)))
    assert "0.800 is more than the 0.700 that 30 of 100 questions" in line
    assert not list(check_side(plain_side(scores=(score.model_copy(update={"none_right": 20}),))))
