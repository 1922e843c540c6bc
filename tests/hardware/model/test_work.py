import pytest

from gemsmith.hardware.model.work import attended_pairs


def test_pairs_by_counting_them():
    for length, window in ((7, 3), (5, 9), (6, None)):
        reach = window or length
        seen = sum(1 for query in range(length) for key in range(length) if 0 <= query - key < reach)
        assert attended_pairs(length, window, "flash") == seen
    assert attended_pairs(4096, None, "dense") == 4096**2


@pytest.mark.parametrize(
    ("length", "window", "block"), [(4096, None, 512), (4096, 1024, 512), (300, 100, 64), (40, None, 64)]
)
def test_blocked_attention_reads_all_that_a_query_sees_and_no_more_than_its_loop(length, window, block):
    blocked, seen = (attended_pairs(length, window, kind, block=block) for kind in ("blocked", "flash"))
    padded = -(-length // block) * block
    assert seen <= blocked <= padded**2
    assert blocked < 0.6 * 4096**2 or length < 4096
